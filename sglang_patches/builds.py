"""Documents that are added while the server runs: the offline builder, in a process of its own, one build at a time."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from redknot.artifact.store import ArtifactStore
from sglang_patches import environment

_NICENESS = 10  # requests come first
_KEPT = 256  # builds that can be asked about


@dataclass
class Build:
    """One build; ``state`` is queued, running, done or failed."""

    namespace: str
    names: tuple[str, ...]
    build_id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: str = "queued"
    error: str | None = None
    result: dict[str, Any] | None = None
    created: float = field(default_factory=time.time)
    seconds: float = 0.0

    def to_dict(self, store: ArtifactStore) -> dict[str, Any]:
        """Plain JSON values; ``built`` are the documents that requests can reuse by now."""
        there = {name for row in store.list(self.namespace) for name in store.names(row.artifact_id, self.namespace)}
        return {
            "build": self.build_id,
            "state": self.state,
            "documents": len(self.names),
            "built": sum(name in there for name in self.names),
            "error": self.error,
            "result": self.result,
            "seconds": round(self.seconds, 3),
        }


class Builds:
    """The builds of one server; what waits is lost with it, and nothing is ever half built."""

    def __init__(self, model: Path, store: Path, profile: str, tp_size: int) -> None:
        self._command = [
            *(sys.executable, "-m", "redknot", "build", "--json"),
            *("--model", str(model), "--store", str(store), "--profile", profile, "--tp-size", str(tp_size)),
        ]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redknot-build")
        self._lock = threading.Lock()
        self._builds: OrderedDict[str, Build] = OrderedDict()

    def start(self, namespace: str, documents: Sequence[tuple[str, str]]) -> Build:
        """Queue a build of documents (name, text)."""
        build = Build(namespace, tuple(name for name, _ in documents))
        with self._lock:
            self._builds[build.build_id] = build
            while len(self._builds) > _KEPT:
                self._builds.popitem(last=False)
        self._thread.submit(self._run, build, list(documents))
        return build

    def get(self, build_id: str, namespace: str) -> Build | None:
        """A build of this namespace."""
        with self._lock:
            found = self._builds.get(build_id)
        return found if found is not None and found.namespace == namespace else None

    def close(self) -> None:
        """Drop what waits."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, build: Build, documents: Sequence[tuple[str, str]]) -> None:
        started, build.state = time.perf_counter(), "running"
        try:
            with TemporaryDirectory(prefix="redknot-build-") as folder:
                corpus = Path(folder) / "documents.jsonl"
                lines = (json.dumps({"id": name, "text": text}) for name, text in documents)
                corpus.write_text("\n".join(lines), encoding="utf-8")
                done = subprocess.run(
                    [*self._command, "--namespace", build.namespace, str(corpus)],
                    capture_output=True,
                    text=True,
                    check=False,
                    stdin=subprocess.DEVNULL,
                    env=environment.for_builder(),
                    preexec_fn=_yield_to_requests,
                )
            self._end(build, done)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            build.state, build.error = "failed", str(error)
        finally:
            build.seconds = time.perf_counter() - started

    def _end(self, build: Build, done: subprocess.CompletedProcess[str]) -> None:
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()
            build.error = last[-1] if last else f"the builder ended with {done.returncode}"
        try:  # also of a build that some documents failed
            build.result = json.loads(done.stdout)
        except ValueError:
            build.error = build.error or "the builder's result cannot be read"
        build.state = "failed" if build.error else "done"


def _yield_to_requests() -> None:
    os.nice(_NICENESS)
