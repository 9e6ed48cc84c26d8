"""What the ranks of test_ranks do; runs in their processes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from redknot.artifact.loaded import LoadedArtifact
from redknot.comm.group import TorchGroup
from redknot.serving.batch import Ask
from redknot.serving.engine import ServingEngine
from tests.kit.miniserver import MiniServer


def serve(group: TorchGroup, folder: Path) -> list[dict[str, Any]]:
    """What each request of jobs.json got on this rank; ``stores`` are per rank, one rank may read slowly."""
    jobs = json.loads((folder / "jobs.json").read_text())
    engine = ServingEngine(
        jobs["checkpoint"],
        jobs["stores"][group.shard.rank],
        jobs["profile"],
        pages=128,
        requests=8,
        context=jobs.get("context", 1024),
        group=group,
        read_timeout_s=1.0,
    )
    with engine:
        if jobs.get("slow") == group.shard.rank:
            _slow()
        server = MiniServer(engine, 128, jobs["chunk"])
        running = [
            server.submit(f"r{number}", ids, jobs["length"], Ask(reuse=reuse))
            for number, (ids, reuse) in enumerate(jobs["requests"])
        ]
        started = time.perf_counter()
        server.run()
        seconds = time.perf_counter() - started
        again = server.answer("again", jobs["requests"][0][0], jobs["length"], Ask(reuse=jobs["requests"][0][1]))
        wrong = engine.check_books()
    return [
        {
            "answer": job.answer,
            "margins": job.margins,
            "failure": str(job.failure),
            "key": str(job.key),
            "cached": job.cached,
            "arm": job.report["arm"] if job.report else "",
            "reason": str(job.report["reason"]) if job.report else "",
            "detail": job.report["detail"] if job.report else "",
            "reused": job.report["reused_tokens"] if job.report else 0,
            "seconds": seconds,
            "wrong": wrong,
        }
        for job in [*running, again]
    ]


def _slow() -> None:
    """Let every section of an artifact take longer than a request waits."""
    native = LoadedArtifact.section

    def late(artifact: LoadedArtifact, name: str) -> Tensor:
        if threading.current_thread().name.startswith("redknot-read"):
            time.sleep(2)
        return native(artifact, name)

    LoadedArtifact.section = late  # type: ignore[method-assign]
