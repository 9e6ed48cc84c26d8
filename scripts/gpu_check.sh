#!/usr/bin/env bash
# Checks the GPU path on this machine in one command; only torch and triton are needed. See docs/gpu.md and --help.
#   PYTHON   the interpreter that has them (default: .venv's where there is one, else python3)
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
exec "$PYTHON" -m benchmarks.gpu_check "$@"
