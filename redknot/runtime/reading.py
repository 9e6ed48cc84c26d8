"""Reading ahead: the sections of a request's artifacts, read and verified on threads while layers run.

Layers are read in groups, first to last, so that a forward waits for the first group alone and finds the others there.
Before a group is used every rank says whether it has its part; where one has not, none uses it, and the request runs
dense. For a GPU the threads also queue the copies to it, on a stream of their own, and an event for each group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from redknot.artifact.reasons import request_reason
from redknot.artifact.schema import parse_section
from redknot.artifact.sections import is_checkpoint
from redknot.comm.group import Group
from redknot.errors import RequestReason, StoreError
from redknot.runtime.library import Refused
from redknot.runtime.restore import Source
from redknot.runtime.staging import CopyStream, StagedSections

GROUP_LAYERS = 4

_Section = tuple[Source, str]


class Reading:
    """What is read for one request; every rank makes one, and calls ``ready`` in the same order."""

    def __init__(
        self,
        threads: Executor,
        group: Group,
        layers: int,
        sources: Sequence[Source],
        on_refusal: Callable[[RequestReason], None] = lambda reason: None,
        copies: CopyStream | None = None,
    ) -> None:
        """Begin to read; ``on_refusal`` is told, on a thread, why sections cannot be used.

        With ``copies`` the sources' sections are ``StagedSections`` on it.
        """
        self._group = group
        self._copies = copies
        self._marks: dict[int, Any] = {}  # by group: the event behind its copies
        self._staged = [s.sections for s in sources if isinstance(s.sections, StagedSections)]
        self._on_refusal = on_refusal
        parts: list[list[_Section]] = [[] for _ in range(-(-layers // GROUP_LAYERS))]
        for source in sources:
            for name in source.names:
                parts[_group_of(name, len(parts))].append((source, name))
        self._jobs: list[Future[None]] = [threads.submit(self._read, *part) for part in enumerate(parts)]
        self._settled = 0  # groups that every rank has
        self._until: float | None = None  # on the clock of ``time.perf_counter``
        self._limit = 0.0
        self.waited = 0.0  # seconds

    def limit(self, seconds: float) -> None:
        """From now on, wait no longer than this for all that is still missing."""
        self._limit, self._until = seconds, time.perf_counter() + seconds

    def ready(self, layer: int) -> None:
        """Wait until every rank has what this layer uses; Refused, on every rank, where one of them will not.

        Copies to a device are not waited for: what this thread queues from now on runs behind them.
        """
        while self._settled <= layer // GROUP_LAYERS:
            self._settle(self._settled)
            self._settled += 1

    def close(self) -> None:
        """Read no more; what was read stays valid."""
        for job in self._jobs:
            job.cancel()
        for sections in self._staged:
            sections.drop()

    def _settle(self, number: int) -> None:
        problem: Refused | None = None
        started = time.perf_counter()
        try:
            left = None if self._until is None else max(self._until - started, 0.0)
            self._jobs[number].result(timeout=left)
        except FutureTimeout:
            detail = f"artifacts were not read within {self._limit:.1f} s, and recomputing is faster than waiting on"
            problem = Refused(RequestReason.SECTION_LATE, detail)
        except Refused as refused:
            problem = refused
        self.waited += time.perf_counter() - started
        agreed = self._group.all_agree(problem is None)
        if problem is not None:
            raise problem
        if not agreed:
            raise Refused(RequestReason.RANK_DISAGREEMENT, "another rank has no sections that it could use")
        if self._copies is not None:
            self._copies.wait(self._marks[number])

    def _read(self, number: int, part: Sequence[_Section]) -> None:
        try:
            for source, name in part:
                if isinstance(source.sections, StagedSections):
                    source.sections.stage(name)
                else:
                    source.sections.section(name)
        except StoreError as error:
            reason = request_reason(error)
            self._on_refusal(reason)
            raise Refused(reason, str(error)) from error
        if self._copies is not None:
            self._marks[number] = self._copies.mark()


def _group_of(name: str, groups: int) -> int:
    """The group of layers that a section is read with: checkpoints come first, streams enter the last layers."""
    layer = parse_section(name).layer
    if layer is not None:
        return layer // GROUP_LAYERS
    return 0 if is_checkpoint(name) else groups - 1
