"""One background thread that does one job after the other, from a queue of bounded length."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from redknot.errors import StoreError

T = TypeVar("T")


class Job(Generic[T]):
    """Work for the worker, and its result. Whoever gives up waiting for it leaves the result to ``undo``."""

    def __init__(self, work: Callable[[], T], undo: Callable[[T], None] | None = None) -> None:
        self._work = work
        self._undo = undo
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._abandoned = False
        self._result: T | None = None

    def run(self) -> None:
        """Work, on the worker's thread."""
        try:
            if not self._set(None):
                return
            result = self._work()
            if not self._set(result) and self._undo is not None:
                self._undo(result)
        finally:
            self._done.set()

    def _set(self, result: T | None) -> bool:
        """Leave a result, unless nobody waits for it any more."""
        with self._lock:
            self._result = result
            return not self._abandoned

    def cancel(self) -> None:
        """Let whoever waits go without a result."""
        self._done.set()

    def wait(self, timeout_s: float) -> T | None:
        """The result; None when there is none within ``timeout_s`` seconds, and then nobody will get one."""
        if self._done.wait(timeout_s):
            return self._result
        with self._lock:
            self._abandoned = self._result is None
            return self._result


class Worker:
    """The thread, which the first job starts, and its queue of at most ``limit`` waiting jobs."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._jobs: deque[Job[Any]] = deque()
        self._busy = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job[T], *, urgent: bool = False, timeout_s: float = 0.0) -> bool:
        """Queue a job, an urgent one before all others; False when the queue stays full for ``timeout_s`` seconds.

        StoreError once the worker has ended: nobody would do the job.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._jobs) < self._limit or self._closed, timeout_s)
            if self._closed:
                raise StoreError("the latent store is closed, or its worker has failed; open it again")
            if len(self._jobs) >= self._limit:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            if urgent:
                self._jobs.appendleft(job)
            else:
                self._jobs.append(job)
            self._changed.notify_all()
            return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running; False when that takes longer than ``timeout_s`` seconds."""
        with self._changed:
            idle = self._changed.wait_for(lambda: not (self._jobs or self._busy) or self._closed, timeout_s)
            return idle and not (self._jobs or self._busy)

    def close(self, timeout_s: float) -> None:
        """Finish the running job and end; queued ones are not done. StoreError when that takes too long."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise StoreError(
                f"the worker of the latent store did not end within {timeout_s} s: its disk does not answer"
            )

    def _loop(self) -> None:
        try:
            while (job := self._next()) is not None:
                job.run()
                del job  # and what it holds, while there is nothing to do
        finally:  # also after an error of ours in a job: nobody may wait for a thread that has gone
            with self._changed:
                self._closed = True
                for job in self._jobs:
                    job.cancel()
                self._changed.notify_all()

    def _next(self) -> Job[Any] | None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if self._closed:
                return None
            job = self._jobs.popleft()
            self._busy = True
            self._changed.notify_all()  # there is room in the queue
            return job


def deadline(timeout_s: float) -> Callable[[], float]:
    """Seconds that are left of ``timeout_s``, never less than none."""
    end = time.monotonic() + timeout_s
    return lambda: max(0.0, end - time.monotonic())
