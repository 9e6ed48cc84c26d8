# The two commands: `make demo` and `make test`. Both set up .venv first, and again only when the packaging changes.
# SGLang pins what it runs with, so that the tests of the plugin and the server have a second environment.
#
#   PYTHON       interpreter that makes the virtual environments (3.11 or newer)
#   PIP          installer to use inside them
#   CONSTRAINTS  constraints file of the first one; empty for none (GPU machines)
#   EVAL_OUT     folder of the evaluation's results and report; a run that was cut goes on there
#   EVAL_ARMS, EVAL_ABLATIONS   arms asked about every task; arms asked about one task only
#   EVAL_ARGS    contexts and how many processes answer: options of python -m eval.nanoqa

PYTHON ?= python3
VENV ?= .venv
VENV_SGLANG ?= .venv-sglang
BIN := $(VENV)/bin
PIP ?= $(@D)/bin/python -m pip
CONSTRAINTS ?= constraints-cpu.txt
INSTALL = $(PIP) --disable-pip-version-check -qq install

EVAL_OUT ?= build/eval
EVAL_ARMS ?= plain,rowsparse,turbo
EVAL_ABLATIONS ?= headsplit,headsplit-table,rowsparse-05,rowsparse-fence-0,adaptive-80
EVAL_ARGS ?= --tokens 768 896 --documents 4 4 --workers 2
EVAL_KEPT := docs/results

DEMO_STAMP := $(VENV)/.installed-demo
DEV_STAMP := $(VENV)/.installed-dev
SGLANG_STAMP := $(VENV_SGLANG)/.installed
SGLANG_TESTS := $(wildcard tests/sglang_patches tests/e2e/server)

.PHONY: help venv venv-sglang demo test test-redknot test-sglang soak eval lint format typecheck bench clean distclean
.NOTPARALLEL:

help:
	@echo "make demo       install what the demo needs and run it"
	@echo "make test       install everything, then lint, type check and run the tests (PYTEST_ARGS=...)"
	@echo "make test-redknot, make test-sglang   the tests of one environment: $(VENV), $(VENV_SGLANG)"
	@echo "make venv       set up $(VENV) with the dev and eval extras"
	@echo "make venv-sglang   set up $(VENV_SGLANG) with the sglang, dev and eval extras"
	@echo "make soak       the slow tests: many random operations and killed processes on the latent store, eight ranks"
	@echo "make eval       measure every profile on nano, then write $(EVAL_OUT)/report.html and docs/results.md"
	@echo "make lint       ruff: rules and formatting        make format     let ruff repair both"
	@echo "make typecheck  mypy, strict on redknot/          make bench      run benchmarks/ (BENCH_ARGS=...)"
	@echo "make clean      remove caches and build outputs   make distclean  and the environments"

venv: $(DEV_STAMP)

venv-sglang: $(SGLANG_STAMP)

demo: $(DEMO_STAMP)
	@$(BIN)/redknot demo $(DEMO_ARGS)

test: lint typecheck test-redknot test-sglang

test-redknot: $(DEV_STAMP)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-sglang: $(SGLANG_STAMP)
	@$(VENV_SGLANG)/bin/python -m pytest $(SGLANG_TESTS) $(PYTEST_ARGS)

soak: $(DEV_STAMP)
	@$(BIN)/python -m tests.latents.soak --operations 200000 --seed 0
	@$(BIN)/python -m tests.latents.soak --operations 200000 --seed 1
	@$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

eval: $(DEV_STAMP)
	@$(BIN)/python -m eval.nanoqa --out $(EVAL_OUT) --arms $(EVAL_ARMS) --timing-lengths 1024 $(EVAL_ARGS)
	@$(BIN)/python -m eval.nanoqa --out $(EVAL_OUT) --tasks latest --arms $(EVAL_ABLATIONS) --only quality $(EVAL_ARGS)
	@$(BIN)/redknot report $(EVAL_OUT)
	@$(BIN)/python -m eval.report.results_page $(EVAL_OUT) $(EVAL_KEPT) --docs docs

lint: $(DEV_STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(DEV_STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

typecheck: $(DEV_STAMP)
	@$(BIN)/mypy

bench: $(DEV_STAMP)
	@set -e; for script in benchmarks/[!_]*.py; do \
		[ -e "$$script" ] || { echo "benchmarks/ holds no script" >&2; exit 1; }; \
		name=$$(basename "$$script" .py); \
		echo "== $$name"; $(BIN)/python -m "benchmarks.$$name" $(BENCH_ARGS); \
	done

clean:
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@find . \( -path ./$(VENV) -o -path ./$(VENV_SGLANG) \) -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV) $(VENV_SGLANG)

# A Python without ensurepip cannot give the new environment a pip, but its own pip can.
$(BIN)/python $(VENV_SGLANG)/bin/python: %/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "redknot needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $* >/dev/null 2>&1 \
		|| { $(PYTHON) -m venv --clear --without-pip $* && $(PYTHON) -m pip -qq --python $@ install pip; }

$(DEMO_STAMP): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "installing redknot into $(VENV); the first time takes a few minutes"
	@$(INSTALL) $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[demo]'
	@touch $@

# The extras of the tests include those of the demo.
$(DEV_STAMP): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "installing redknot with its test tools into $(VENV); the first time takes a few minutes"
	@$(INSTALL) $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[dev,eval]'
	@touch $@ $(DEMO_STAMP)

# No constraints: SGLang pins a build of torch that they exclude.
$(SGLANG_STAMP): pyproject.toml | $(VENV_SGLANG)/bin/python
	@echo "installing redknot with SGLang into $(VENV_SGLANG); the first time takes several minutes"
	@$(INSTALL) -e '.[sglang,dev,eval]'
	@touch $@
