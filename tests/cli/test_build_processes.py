"""Builders that are killed, and builders side by side, as real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.corpus import write_corpus

NAMES = [f"d{number}.txt" for number in range(6)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", [150, 40, 90, 200, 41, 60])


def temporary() -> list[str]:
    return os.listdir("redknot-store/tmp")


COMMAND = "import sys; from redknot.cli.main import main; sys.exit(main(sys.argv[1:]))"
KILLED = """
import os, signal, sys
from redknot.build import builder
builder.BATCH_TOKENS = 80
native = os.fsync
def fsync(descriptor):
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if "/redknot-store/tmp/" in path and os.listdir("redknot-store/objects"):
        os.kill(os.getpid(), signal.SIGKILL)  # in the middle of the second batch
    native(descriptor)
os.fsync = fsync
"""


def spawn(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_build_goes_on(redknot, corpus, checkpoint):
    process = spawn(KILLED + COMMAND, "build", corpus, "--model", checkpoint)
    process.communicate(timeout=250)
    assert process.returncode == -signal.SIGKILL
    assert len(temporary()) == 1
    listed = len(redknot("ls", "--json").json)
    assert listed == 2
    report = redknot("build", corpus, "--model", checkpoint, "--json").json
    assert (report["skipped"], report["built"]) == (listed, 6 - listed)
    assert temporary() == []
    assert redknot("verify").code == redknot("doctor", "--model", checkpoint).code == 0


def test_two_builders_at_once(redknot, corpus, checkpoint):
    """Through the module of the README too; whoever is second takes what the first has made."""
    alias = "import runpy; runpy.run_module('redknot.build_artifacts', run_name='__main__')"
    builders = [spawn(alias, corpus, "--model", checkpoint) for _ in range(2)]
    for process in builders:
        _, err = process.communicate(timeout=250)
        assert (process.returncode, err) == (0, "")
    assert temporary() == []
    assert redknot("verify").code == 0
    assert sorted(name for one in redknot("ls", "--json").json for name in one["names"]) == NAMES
    assert redknot("gc", "--grace", "0").code == 0
    assert redknot("doctor", "--model", checkpoint).code == 0
