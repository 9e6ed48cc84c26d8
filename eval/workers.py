"""Clusters of questions over one engine in this process, or over several processes that share the cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from eval.answering import Outcome, Question, ask_all
from eval.arms import Arm
from eval.engines.base import ArmEngine
from eval.engines.opening import open_engine
from redknot.errors import RedKnotError

Cluster = Sequence[Question]
Answered = tuple[Cluster, list[list[Outcome]]]
_AHEAD = 2  # clusters a worker that wait for it: it never idles, and prompts are not all in memory


@dataclass(frozen=True)
class Opening:
    """What it takes to open an engine, in this process or in another."""

    engine: str  # as --engine has it
    checkpoint: Path
    store: Path
    arms: Mapping[str, Arm]
    tp: int

    def open(self) -> ArmEngine:
        """Open it; RedKnotError when it cannot be had."""
        return open_engine(self.engine, self.checkpoint, self.store, self.arms, self.tp)


def answered(opening: Opening, clusters: Iterable[Cluster], checkpoint: str, workers: int) -> Iterator[Answered]:
    """The outcomes of clusters, in whatever order they end. ``checkpoint`` is the digest that every arm must name."""
    if workers == 1:
        with closing(opening.open()) as engine:
            for cluster in clusters:
                yield cluster, ask_all(engine, opening.arms, cluster, checkpoint)
        return
    threads = max(1, (os.cpu_count() or 1) // workers)
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(workers, context, _start, (opening, threads)) as pool:
        try:
            yield from _spread(pool, clusters, checkpoint, workers * _AHEAD)
        except BrokenProcessPool:
            raise RedKnotError("a worker ended; the same command goes on from there, with fewer --workers") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _spread(pool: ProcessPoolExecutor, clusters: Iterable[Cluster], checkpoint: str, ahead: int) -> Iterator[Answered]:
    rest, running = iter(clusters), dict[Future[list[list[Outcome]]], Cluster]()
    while True:
        for cluster in islice(rest, ahead - len(running)):
            running[pool.submit(_work, cluster, checkpoint)] = cluster
        if not running:
            return
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield running.pop(future), future.result()


_opened: tuple[ArmEngine, Mapping[str, Arm]] | None = None  # of a worker process, for as long as it lives


def _start(opening: Opening, threads: int) -> None:
    global _opened
    torch.set_num_threads(threads)
    _opened = opening.open(), opening.arms


def _work(cluster: Cluster, checkpoint: str) -> list[list[Outcome]]:
    assert _opened is not None  # _start ran
    return ask_all(*_opened, cluster, checkpoint)
