"""scripts/serve_demo.sh says in one line what is wrong, before it starts anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "serve_demo.sh"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], env=os.environ | environment, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nowhere/bin/python is missing; 'make venv-sglang' makes the environment (or set VENV_SGLANG)"),
        (("--fast",), "unknown option --fast; see --help"),
        (("--port",), "--port needs a value"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments, VENV_SGLANG="nowhere")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"serve_demo: {message}\n")


def test_help() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: scripts/serve_demo.sh")
