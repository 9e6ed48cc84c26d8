"""The shape of the tree, read from the source: who may import whom, who reads the environment, what git holds.

The rules are functions over source text, so that each can be shown to catch what it is for.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Folder or top-level module of redknot/ -> import rank: a module imports only lower ranks or its own folder.
RANKS = {
    "errors": 0,
    "config": 0,
    "durable": 0,
    "device": 0,
    "model": 1,
    "comm": 0,
    "ops": 2,
    "latents": 2,
    "artifact": 3,
    "plan": 4,
    "runtime": 5,
    "build": 6,
    "serving": 7,
    "nano": 7,
    "cli": 8,
    "__main__": 9,
    "build_artifacts": 9,
}
LATE_EVAL = {"redknot/cli/report.py"}  # the verb that shows what eval/ measured, and needs its extra
NOT_FOR_REDKNOT = {"sglang", "sglang_patches", "eval", "tests", "scripts", "benchmarks"}
NOT_FOR_THE_PLUGIN = {"eval", "tests", "scripts", "benchmarks"}
READS_ENVIRONMENT = {"redknot/config.py", "sglang_patches/environment.py"}
PACKAGES = ("redknot", "sglang_patches", "eval")
# A package's front door may hold names and lazy exports; it imports nothing but these when it is imported.
FRONT_DOORS = {"redknot/__init__.py", "sglang_patches/__init__.py"}
FRONT_DOOR_IMPORTS = {"__future__", "importlib", "typing"}

MACHINE_PATH = re.compile(r"(?<![\w.})\]])/(?:work|home|root|opt|mnt|Users)/[\w.-]|\b[A-Z]:\\Users\\")

MODULES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "redknot").rglob("*.py"))
PLUGIN = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "sglang_patches").rglob("*.py"))


def imported_names(source: str, module: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that the file `module` imports; `from a.b import c` gives `a.b.c`."""
    package = module.split("/")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def unit_of(module: str) -> str:
    """The folder, or the top-level module, of redknot/ that a file belongs to; empty for the front door."""
    parts = module.removesuffix(".py").split("/")
    return "" if parts[1] == "__init__" else parts[1]


def inside_functions(source: str) -> set[int]:
    """Lines of imports that run when a function is called, not when the module is imported."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    nodes = [node for function in functions for node in ast.walk(function)]
    return {node.lineno for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)}


def rank_violations(source: str, module: str) -> list[str]:
    unit = unit_of(module)
    if unit and unit not in RANKS:
        return [f"{module}: {unit} has no import rank; give it one in {Path(__file__).name}"]
    found = []
    late = inside_functions(source) if module in LATE_EVAL else set()
    for line, name in imported_names(source, module):
        top, _, rest = name.partition(".")
        if top == "eval" and line in late:
            continue
        if top in NOT_FOR_REDKNOT:
            found.append(f"{module}:{line} imports {name}, which redknot/ never does")
        if top != "redknot" or not unit or rest == "__version__":
            continue
        target = rest.partition(".")[0]
        if target not in RANKS:
            found.append(f"{module}:{line} imports {name}, which has no import rank")
        elif target != unit and RANKS[target] >= RANKS[unit] and not RANKS[target] == RANKS[unit] == 0:
            found.append(f"{module}:{line} (rank {RANKS[unit]}) imports {name} (rank {RANKS[target]})")
    return found


def plugin_violations(source: str, module: str) -> list[str]:
    """Imports that the plugin must not have, and those of sglang that run when one of its modules is imported.

    SGLang chooses its platform when it is imported, and the plugin comes before that; it also looks up its entry points
    in every process, wanted or not.
    """
    inside = inside_functions(source)
    found = []
    for line, name in imported_names(source, module):
        top = name.partition(".")[0]
        if top in NOT_FOR_THE_PLUGIN:
            found.append(f"{module}:{line} imports {name}, which sglang_patches/ never does")
        elif top == "sglang" and line not in inside:
            found.append(f"{module}:{line} imports {name} when it is imported itself")
    return found


def environment_reads(source: str) -> list[int]:
    """Lines that touch the environment, by attribute or by imported name."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    lines = []
    for node in ast.walk(ast.parse(source)):
        by_attribute = (
            isinstance(node, ast.Attribute)
            and node.attr in names
            and isinstance(node.value, ast.Name)
            and node.value.id in ("os", "posix")
        )
        by_import = isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}
        if by_attribute or by_import:
            lines.append(node.lineno)
    return lines


def eager_code(source: str, module: str) -> list[str]:
    """What an `__init__` does besides carrying a docstring (a front door may also define names and lazy exports)."""
    body = ast.parse(source).body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    if module not in FRONT_DOORS:
        return [f"{module}:{node.lineno} holds code; a folder's __init__ is empty or a docstring" for node in body]
    found = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.Assign | ast.AnnAssign):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        tops = {name.partition(".")[0] for _, name in imported_names(ast.unparse(node), module)}
        if not isinstance(node, ast.Import | ast.ImportFrom) or tops - FRONT_DOOR_IMPORTS:
            found.append(f"{module}:{node.lineno} runs at import: {ast.unparse(node)}")
    return found


def git_files(*arguments: str) -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git work tree")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_the_ranks(module):
    assert rank_violations((ROOT / module).read_text(), module) == []


@pytest.mark.parametrize("module", PLUGIN)
def test_the_plugin_imports_sglang_late(module):
    assert plugin_violations((ROOT / module).read_text(), module) == []


@pytest.mark.parametrize("module", [m for m in MODULES + PLUGIN if m not in READS_ENVIRONMENT])
def test_environment_is_read_in_one_module_of_each_package(module):
    assert environment_reads((ROOT / module).read_text()) == []


def test_every_folder_has_a_plain_init():
    found = []
    for package in PACKAGES:
        for folder in sorted({path.parent for path in (ROOT / package).rglob("*.py")}):
            init = folder / "__init__.py"
            name = init.relative_to(ROOT).as_posix()
            found += eager_code(init.read_text(), name) if init.exists() else [f"{name} is missing"]
    assert found == []


def test_no_machine_paths_in_the_repository():
    found = []
    for name in git_files("--cached", "--others", "--exclude-standard"):
        content = (ROOT / name).read_bytes()
        if b"\0" in content[:8192]:
            continue
        for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
            if match := MACHINE_PATH.search(line):
                found.append(f"{name}:{number} names {match.group()}...")
    assert found == []


def test_git_ignores_no_source():
    """A pattern such as "build" without a leading slash would leave out redknot/build and tests/build."""
    folders = [*PACKAGES, "tests", "scripts", "benchmarks"]
    ignored = git_files("--others", "--ignored", "--exclude-standard", "--", *folders)
    assert [name for name in ignored if name.endswith(".py")] == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("redknot/ops/lse.py", "from redknot.artifact.store import Store"),
        ("redknot/ops/lse.py", "from redknot import artifact"),
        ("redknot/ops/lse.py", "import redknot.latents.pool"),
        ("redknot/ops/lse.py", "from ..latents import pool"),
        ("redknot/ops/lse.py", "from redknot import Engine"),
        ("redknot/ops/lse.py", "import importlib; importlib.import_module('redknot.cli.main')"),
        ("redknot/errors.py", "from redknot.model import geometry"),
        ("redknot/runtime/engine.py", "def f():\n    import sglang.srt"),
        ("redknot/__init__.py", "import sglang"),
        ("redknot/cli/report.py", "from eval.report.write import write_report"),
        ("redknot/cli/build.py", "def f():\n    from eval.report.write import write_report"),
        ("redknot/elsewhere/thing.py", ""),
    ],
)
def test_the_rank_rule_catches(module, line):
    assert len(rank_violations(line, module)) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("redknot/ops/lse.py", "from redknot.ops.rope import rotate"),
        ("redknot/ops/lse.py", "from . import rope"),
        ("redknot/ops/lse.py", "from .rope import rotate"),
        ("redknot/ops/lse.py", "from redknot.model.geometry import Geometry"),
        ("redknot/config.py", "from redknot.errors import ConfigError"),
        ("redknot/cli/main.py", "from redknot import __version__"),
        ("redknot/cli/report.py", "def f():\n    from eval.report.write import write_report"),
        ("redknot/__init__.py", "def __getattr__(name):\n    from redknot.runtime.engine import Engine"),
    ],
)
def test_the_rank_rule_admits(module, line):
    assert rank_violations(line, module) == []


@pytest.mark.parametrize(
    "source",
    [
        "import sglang",
        "from sglang.srt import server_args",
        "class A:\n    from sglang import Engine",
        "import importlib; importlib.import_module('sglang.srt')",
        "def f():\n    from tests.kit import child",
        "import eval.report",
    ],
)
def test_the_plugin_rule_catches(source):
    assert len(plugin_violations(source, "sglang_patches/thing.py")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    import sglang.srt",
        "async def f():\n    from sglang import Engine",
        "class A:\n    def f(self):\n        from sglang import Engine",
        "from redknot.errors import ConfigError\nfrom sglang_patches import environment",
    ],
)
def test_the_plugin_rule_admits(source):
    assert plugin_violations(source, "sglang_patches/thing.py") == []


@pytest.mark.parametrize("line", ["import os; os.environ['A']", "import os; os.getenv('A')", "from os import environ"])
def test_the_environment_rule_catches(line):
    assert environment_reads(line) == [1]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("redknot/ops/__init__.py", "from redknot.ops.rope import rotate"),
        ("redknot/ops/__init__.py", "__all__ = []"),
        ("redknot/__init__.py", "from redknot.runtime.engine import Engine"),
        ("redknot/__init__.py", "import torch"),
        ("redknot/__init__.py", "print()"),
    ],
)
def test_the_init_rule_catches(module, line):
    assert len(eager_code(f'"""Doc."""\n{line}', module)) == 1


def test_the_init_rule_admits_lazy_exports():
    source = '"""Doc."""\nfrom typing import TYPE_CHECKING\n__version__ = "1"\nif TYPE_CHECKING:\n    import torch\n'
    assert eager_code(source + "def __getattr__(name):\n    import torch\n", "redknot/__init__.py") == []


@pytest.mark.parametrize("folder", ["work", "home", "root", "opt", "Users"])
def test_the_path_rule_catches_machine_paths_only(folder):
    assert MACHINE_PATH.search(f'open("/{folder}/somebody/file")')
    assert not MACHINE_PATH.search(f"https://example.org/{folder}/page and docs/{folder}/page and ../{folder}/x")
