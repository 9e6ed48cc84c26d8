"""scripts/serve_demo.sh says in one line what is wrong, before it starts anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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


# In place of a Python with SGLang: builds nothing, and a server and a client that do not end by themselves.
_STUB = """#!{python}
import os, pathlib, socket, sys, time
words = " ".join(sys.argv[1:])
if "free_port" in words:
    print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])
elif "launch_server" in words:
    open({folder!r} + "/server", "w").write(str(os.getpid()))
    listening = socket.create_server(("127.0.0.1", int(words.split("--port ")[1].split()[0])))
    time.sleep(300)
elif "ask_server" in words:
    open({folder!r} + "/client", "w").write(str(os.getpid()))
    time.sleep(300)
"""


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_everything_stops_with_it(tmp_path: Path, sent: signal.Signals, status: int) -> None:
    """As with Ctrl-C, which a terminal sends to the whole group of the script."""
    stub = tmp_path / "venv" / "bin" / "python"
    stub.parent.mkdir(parents=True)
    stub.write_text(_STUB.format(python=sys.executable, folder=str(tmp_path)))
    stub.chmod(0o755)
    environment = os.environ | {"VENV_SGLANG": str(tmp_path / "venv")}
    command = [SCRIPT, "--store", str(tmp_path / "out" / "store")]
    script = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell in the background ignores it
    )
    try:
        deadline = time.monotonic() + 60
        while not ((tmp_path / "client").exists() and (tmp_path / "client").read_text()):
            assert script.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(script.pid, sent)
        assert script.wait(timeout=60) == status
        for name in ("server", "client"):
            with pytest.raises(ProcessLookupError):
                _wait_until_gone(int((tmp_path / name).read_text()))
    finally:
        script.kill()


def _wait_until_gone(pid: int) -> None:
    """ProcessLookupError when it is; what ended on a machine without an init that reaps counts too."""
    for _ in range(100):
        os.kill(pid, 0)
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            raise ProcessLookupError from None
        if state == "Z":
            raise ProcessLookupError
        time.sleep(0.1)
