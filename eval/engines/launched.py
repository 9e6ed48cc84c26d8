"""A server that this process starts, and that ends with it, however that ends."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from eval.engines.server import Server
from eval.engines.wire import ServerError, shown
from eval.progress import progress
from redknot.errors import ConfigError

START_LIMIT_S = 300
_STOP_LIMIT_S = 15
_TAIL_BYTES, _TAIL_LINES = 4000, 3
_OURS = "redknot: "  # begins the line of a refusal
_TAKEN = os.strerror(errno.EADDRINUSE).lower()  # SGLang writes it and stays, deaf
_PORTS = range(20000, 32768)  # Linux gives away 32768 and up, net.ipv4.ip_local_port_range


def free_port() -> int:
    """One of the loopback that nobody listens on now, below those that the system gives away by itself.

    SGLang opens many of the latter while it starts, long before the server listens. ServerError without any.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: connections may linger
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError("no port of the loopback from 20000 to 32767 is free")


@dataclass
class Launched:
    """A server on a free port of the loopback. ``log`` keeps what it writes; without, a file that has no name does."""

    model: Path | str
    store: Path
    options: Sequence[str] = ()
    profiles: Sequence[str] = ()  # files of profiles that requests may name
    log: Path | None = None
    environment: Mapping[str, str] | None = None  # None: this process's own
    url: str = field(init=False, default="")
    _process: subprocess.Popen[bytes] | None = field(init=False, default=None)
    _out: IO[bytes] | None = field(init=False, default=None)
    _files: ExitStack = field(init=False, default_factory=ExitStack)

    def start(self) -> float:
        """Start it and wait until it is healthy: the seconds that took. ServerError with what it wrote when it ends.

        ConfigError where SGLang is not installed.
        """
        if find_spec("sglang") is None:
            raise ConfigError("sglang is not installed here; make venv-sglang sets up an environment that has it")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        opened = tempfile.TemporaryFile() if self.log is None else self.log.open("w+b")  # noqa: SIM115  closed by stop
        self._out = self._files.enter_context(opened)
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model), "--device", "cpu"),
            *("--enable-redknot", "--redknot-store", str(self.store), "--host", "127.0.0.1", "--port", str(port)),
            *self.options,
            *self._configuration(),
        ]
        started = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._out,
            start_new_session=True,  # a Ctrl-C is ours alone; the server is then stopped in order
            preexec_fn=_end_with_parent,
        )
        try:
            self._wait(started)
        except BaseException:
            self.stop()
            raise
        return time.perf_counter() - started

    @property
    def running(self) -> bool:
        """Whether its process has not ended."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End all its processes, politely first; ServerError when some are left."""
        process, self._process = self._process, None
        try:
            if process is not None:
                _stop(process)
        finally:
            self._files.close()

    def __enter__(self) -> Launched:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _configuration(self) -> list[str]:
        """The options that let requests name more profiles than the shipped ones."""
        if not self.profiles:
            return []
        opened = tempfile.NamedTemporaryFile("w", prefix="redknot-", suffix=".json")  # noqa: SIM115  closed by stop
        file = self._files.enter_context(opened)
        json.dump({"profiles": list(self.profiles)}, file)
        file.flush()
        return ["--redknot-config", file.name]

    def _wait(self, started: float) -> None:
        server = Server(self.url)
        with progress(START_LIMIT_S, "s", "starting the server") as bar:
            while not server.healthy():
                if not self.running:
                    raise ServerError(f"the server did not start: {self._last_words()}")
                if _TAKEN in self._written().lower():
                    raise ServerError(f"the server did not start, its port was taken: {self._last_words()}")
                seconds = time.perf_counter() - started
                if seconds > START_LIMIT_S:
                    raise ServerError(f"the server was not healthy after {START_LIMIT_S} s: {self._last_words()}")
                bar.update(int(seconds) - bar.n)
                time.sleep(0.25)
        server.close()

    def _last_words(self) -> str:
        """The line in which the plugin refuses, or the end of what was written."""
        lines = [line.strip() for line in self._written().splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith(_OURS)]
        return shown(ours[-1] if ours else " / ".join(lines[-_TAIL_LINES:]) or "it wrote nothing")

    def _written(self) -> str:
        """The end of what it wrote."""
        assert self._out is not None  # it was started
        size = self._out.seek(0, os.SEEK_END)
        start = max(size - _TAIL_BYTES, 0)
        return os.pread(self._out.fileno(), _TAIL_BYTES, start).decode(errors="replace")


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: SGLang's other processes end with this one


def _stop(process: subprocess.Popen[bytes]) -> None:
    for sent in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _STOP_LIMIT_S
        try:
            os.killpg(process.pid, sent)
            while time.monotonic() < deadline:
                process.poll()  # reaps the leader
                os.killpg(process.pid, 0)
                time.sleep(0.1)
        except ProcessLookupError:
            process.wait()
            return
    raise ServerError(f"processes of group {process.pid} are left; end them by hand")
