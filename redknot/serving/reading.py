"""How long a request waits for its artifacts: as long as that pays.

The break-even rule allows what running the rows that reuse skips would take, at the rate at which prefills ran here.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

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
        self._longest_s = longest_s
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="redknot-read")

    def start(self, served: Served) -> None:
        """Begin to read what a request is to reuse."""
        if served.agreement is not None and served.sources:
            served.reading = served.agreement.reading(self._threads, served.sources)

    def limit(self, served: Served, worth_s: float) -> None:
        """The request's turn has come: from now on it waits as long as is worth it, or a little."""
        if served.reading is not None:
            served.reading.limit(min(max(worth_s, LEAST_WAIT_S), self._longest_s))

    def close(self) -> None:
        """End the threads; what nobody began to read is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
