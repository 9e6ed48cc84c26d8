"""Python in a process of its own, with no variable of SGLang or RedKnot in its environment and this tree first."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "models" / "nano"
_OURS = ("SGLANG_", "REDKNOT_")
_LIMIT_S = 240  # importing SGLang takes ten seconds on two idle cores


@dataclass(frozen=True)
class Ended:
    """What a process said, and how it ended."""

    code: int
    out: str
    err: str


def environment(**changes: str) -> dict[str, str]:
    """The environment of a child."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    # `sglang` is a script in another folder; everything else would find this tree without the path.
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | changes


def run(*command: object, **changes: str) -> Ended:
    """Run a command to its end."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=ROOT, env=environment(**changes), capture_output=True, text=True, check=False, timeout=_LIMIT_S
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def python(source: str, *arguments: object, **changes: str) -> Ended:
    """Run source text; ``sys.argv`` ends with the arguments."""
    return run(sys.executable, "-c", source, *arguments, **changes)
