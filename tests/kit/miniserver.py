"""A server in miniature over a serving engine: it numbers pages, keeps a prefix tree, cuts prefills into chunks, mixes
them with decode steps, takes requests back and lets them come again. What SGLang does, in a hundred lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from redknot.serving.batch import Ask, Piece
from redknot.serving.engine import ServingEngine


@dataclass
class Job:
    """One request; ``ids`` grow with its answer."""

    name: str
    ids: list[int]
    prompt: int
    length: int
    key: str | None = None
    at: int = 0  # rows that have run, or came from the tree
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    report: dict[str, Any] | None = None
    failure: str | None = None
    margins: list[float] = field(default_factory=list)  # of the two likeliest tokens

    @property
    def answer(self) -> list[int]:
        return self.ids[self.prompt :]

    @property
    def done(self) -> bool:
        return self.failure is not None or len(self.answer) == self.length


class MiniServer:
    """``chunk`` rows of a prefill at most in one forward, a multiple of the page."""

    def __init__(self, engine: ServingEngine, pages: int, chunk: int = 64) -> None:
        self.engine, self.chunk, self.size = engine, chunk, engine.page_tokens
        self.free = list(range(pages - 1, 0, -1))
        self.tree: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self.running: list[Job] = []
        self.forwards = 0

    def submit(self, name: str, ids: Sequence[int], length: int = 4, ask: Ask | None = None, **options: Any) -> Job:
        job = Job(name, list(ids), len(ids), length)
        prompt = tuple(ids)
        admission = self.engine.admit(
            name, ids, ask or Ask(), cached_pages=lambda key: self._hit(key, prompt), **options
        )
        job.key = admission.extra_key
        self._start(job)
        return job

    def answer(self, name: str, ids: Sequence[int], length: int = 4, ask: Ask | None = None, **options: Any) -> Job:
        job = self.submit(name, ids, length, ask, **options)
        self.run()
        return job

    def run(self) -> None:
        while self.running:
            self.step()

    def step(self, only: Sequence[Job] | None = None) -> None:
        """One forward over all running jobs, or some."""
        jobs = list(self.running if only is None else only)
        pieces = [self._piece(job) for job in jobs]
        outcome = self.engine.forward(pieces)
        self.forwards += 1
        for job, piece, logits in zip(jobs, pieces, outcome.logits, strict=True):
            job.report = outcome.reports.get(job.name, job.report)
            job.failure = outcome.failures.get(job.name)
            job.at = piece.stop
            if piece.final and job.failure is None:
                best = logits.topk(2)
                job.margins.append(float(best.values[0] - best.values[1]))
                job.ids.append(int(best.indices[0]))
            self._insert(job)
            if job.done:
                self._end(job)

    def retract(self, job: Job) -> None:
        """Take a job's memory; it starts again from what the tree has."""
        self.engine.release(job.name, ended=False)
        self._give_up(job)
        job.at, job.pages = 0, []
        self.running.remove(job)
        self._start(job)

    def abort(self, job: Job) -> None:
        job.failure = "aborted"
        self._end(job)

    def evict(self, keep: int = 0) -> None:
        """Drop all but the ``keep`` shortest prefixes of the tree that no running job uses."""
        used = {page for job in self.running for page in job.pages}
        for entry in sorted(self.tree, key=lambda entry: -len(entry[1]))[: max(len(self.tree) - keep, 0)]:
            if self.tree[entry] not in used:
                self._free([self.tree.pop(entry)])

    def _hit(self, key: str | None, ids: Sequence[int]) -> list[int]:
        found = []
        for end in range(self.size, len(ids), self.size):  # never the last token: its logits are wanted
            page = self.tree.get((key, tuple(ids[:end])))
            if page is None:
                break
            found.append(page)
        return found

    def _start(self, job: Job) -> None:
        job.pages = self._hit(job.key, job.ids)
        job.at = job.cached = len(job.pages) * self.size
        self.running.append(job)

    def _piece(self, job: Job) -> Piece:
        total = len(job.ids)
        stop = min(job.at + self.chunk, total)
        while len(job.pages) * self.size < stop:
            job.pages.append(self.free.pop())
        rows = torch.tensor(job.ids[job.at : stop])
        return Piece(job.name, job.at, stop, rows, list(job.ids), list(job.pages), stop == total)

    def _insert(self, job: Job) -> None:
        """Full pages become the tree's, unless it has them already."""
        for number in range(job.at // self.size if job.failure is None else 0):
            self.tree.setdefault((job.key, tuple(job.ids[: (number + 1) * self.size])), job.pages[number])

    def _end(self, job: Job) -> None:
        self.engine.release(job.name)
        self._give_up(job)
        self.running.remove(job)

    def _give_up(self, job: Job) -> None:
        kept = set(self.tree.values())
        self._free([page for page in job.pages if page not in kept])

    def _free(self, pages: list[int]) -> None:
        self.engine.free_pages(pages)
        self.free += pages
