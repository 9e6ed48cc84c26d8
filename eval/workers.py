"""Clusters of questions over one engine in this process, or over several processes that share the cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
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
Answering = Callable[[Iterable[Cluster]], Iterator[Answered]]
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


def answered_here(engine: ArmEngine, arms: Mapping[str, Arm], checkpoint: str) -> Answering:
    """Over an engine of this process. ``checkpoint`` is the digest that every arm must name."""

    def run(clusters: Iterable[Cluster]) -> Iterator[Answered]:
        for cluster in clusters:
            yield cluster, ask_all(engine, arms, cluster, checkpoint)

    return run


def answered_by_processes(opening: Opening, checkpoint: str, workers: int) -> Answering:
    """Over an engine in each of several processes, in whatever order clusters end."""

    def run(clusters: Iterable[Cluster]) -> Iterator[Answered]:
        threads = max(1, (os.cpu_count() or 1) // workers)
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        with ProcessPoolExecutor(workers, context, _start, (opening, threads)) as pool:
            try:
                yield from _spread(pool, clusters, checkpoint, workers * _AHEAD)
            except BrokenProcessPool:
                raise RedKnotError("a worker ended; the same command goes on, with fewer --workers maybe") from None
            finally:
                pool.shutdown(cancel_futures=True)

    return run


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
