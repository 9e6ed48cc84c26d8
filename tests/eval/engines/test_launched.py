"""Servers that are started here: told apart from SGLang's only by their module, they end however we do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eval.engines import launched
from eval.engines.launched import Launched
from eval.engines.server import Server
from eval.engines.wire import ServerError
from redknot.errors import ConfigError
from tests.kit.child import ROOT

# Serves health, and leaves a child of the group to be ended.
HEALTHY = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, "words", *sys.argv[1:], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
DEAF = "import time; print('loading', flush=True); time.sleep(600)"
REFUSES = (
    "import sys; print('noise'); print('redknot: --redknot-store x: no such folder', file=sys.stderr); sys.exit(2)"
)
RAISES = "def f():\n    raise ValueError('no\\nsuch thing')\nf()"
SILENT = ""
TAKEN = (
    "import time; print(\"[Errno 98] error while attempting to bind on address ('127.0.0.1', 1): "
    'address already in use", flush=True); time.sleep(600)'
)


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def words(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8").split()


def test_it_starts_and_ends_with_all_its_processes(sglang, tmp_path):
    log = tmp_path / "log"
    server = Launched("nano", Path("a store"), ["--tp-size", "2"], ["a.json"], log, sglang(HEALTHY))
    with server:
        assert server.running
        assert Server(server.url).healthy()
        said = words(log)
        assert "--enable-redknot" in said
        assert said[said.index("--tp-size") + 1] == "2"
        config = Path(said[said.index("--redknot-config") + 1])
        assert config.read_text(encoding="utf-8") == '{"profiles": ["a.json"]}'
        first = int(said[1])
        assert alive(first)
    wait_until_gone(first)
    assert not server.running
    assert not config.exists()
    server.start()
    second = int(words(log)[1])
    server.stop()
    wait_until_gone(second)
    server.stop()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_it_ends_when_its_user_does(sglang, tmp_path, error):
    log = tmp_path / "log"
    with pytest.raises(error), Launched("nano", Path("x"), log=log, environment=sglang(HEALTHY)):
        raise error
    wait_until_gone(int(words(log)[1]))


def test_it_ends_with_a_process_that_is_killed(sglang, tmp_path):
    log, environment = tmp_path / "log", sglang(HEALTHY)
    source = (
        "import time; from pathlib import Path; from eval.engines.launched import Launched\n"
        f"server = Launched('nano', Path('x'), log=Path({str(log)!r})); server.start()\n"
        "print(server._process.pid, flush=True); time.sleep(600)"
    )
    user = subprocess.Popen(
        [sys.executable, "-c", source], env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert user.stdout is not None
    pid = int(user.stdout.readline())
    assert alive(pid)
    user.send_signal(signal.SIGKILL)
    user.wait()
    user.stdout.close()
    wait_until_gone(pid)
    os.kill(int(words(log)[1]), signal.SIGKILL)  # what SGLang's own watch over its parent would do


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (REFUSES, "did not start: redknot: --redknot-store x: no such folder$"),
        (RAISES, "did not start: .*ValueError: no"),
        (SILENT, "did not start: it wrote nothing"),
        (TAKEN, "did not start, its port was taken: .*address already in use"),
    ],
)
def test_its_last_words(sglang, source, message):
    with pytest.raises(ServerError, match=message) as caught:
        Launched("nano", Path("x"), environment=sglang(source)).start()
    assert "\n" not in str(caught.value)


def test_a_port_is_free_and_not_of_those_that_the_system_gives_away(monkeypatch):
    with socket.create_server(("127.0.0.1", launched.free_port())) as taken:
        port = taken.getsockname()[1]
        system = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()
        assert not int(system[0]) <= port <= int(system[1])
        monkeypatch.setattr(launched, "_PORTS", range(port, port + 1))
        with pytest.raises(ServerError, match="no port of the loopback"):
            launched.free_port()


def test_one_that_never_answers(sglang, monkeypatch):
    monkeypatch.setattr(launched, "START_LIMIT_S", 2)
    server = Launched("nano", Path("x"), environment=sglang(DEAF))
    with pytest.raises(ServerError, match="not healthy after 2 s: loading"):
        server.start()
    assert not server.running


def test_without_sglang(monkeypatch):
    monkeypatch.setattr(launched, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="make venv-sglang"):
        Launched("nano", Path("x")).start()
