"""Reading ahead: what a request will use of its artifacts is read and verified while it waits for its turn.

A file system has no order that a request could rely on, so it waits for all of it, for as long as that pays: the
break-even rule allows what running the rows that reuse skips would take. Never is a part of it used.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from redknot.errors import RequestReason
from redknot.runtime.library import Refused
from redknot.serving.served import Served

_THREADS = 2
LEAST_WAIT_S = 1.0  # a disk that is busy for a moment is no reason to recompute


@dataclass
class Rate:
    """FLOPs a second that prefills of this process ran at; 0 until there was one."""

    flops: float = 0.0
    seconds: float = 0.0

    def add(self, flops: int, seconds: float) -> None:
        """One prefill."""
        self.flops += flops
        self.seconds += seconds

    def seconds_of(self, flops: float) -> float:
        """How long so much would take; without a prefill to go by, no time at all."""
        return flops * self.seconds / self.flops if self.flops else 0.0


class Readers:
    """Threads that read for the requests of one process; ``longest_s`` is the most that a request waits."""

    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="redknot-read")

    def start(self, served: Served) -> None:
        """Begin to read what a request is to reuse."""
        if served.agreement is not None and served.sources:
            served.reading = self._threads.submit(served.agreement.read, served.sources)

    def wait(self, served: Served, worth_s: float) -> None:
        """Wait until everything was read, at most ``worth_s`` or a little; Refused where it was not, or cannot be."""
        reading: Future[None] | None = served.reading
        if reading is None:
            return
        started, limit = time.perf_counter(), min(max(worth_s, LEAST_WAIT_S), self.longest_s)
        try:
            reading.result(timeout=limit)
        except FutureTimeout:
            detail = f"artifacts were not read within {limit:.1f} s, and recomputing is faster than waiting on"
            raise Refused(RequestReason.SECTION_LATE, detail) from None
        finally:
            wall = served.request.wall
            wall["read_wait_s"] = wall.get("read_wait_s", 0.0) + time.perf_counter() - started

    def close(self) -> None:
        """End the threads; what nobody began to read is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
