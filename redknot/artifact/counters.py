"""Counters of one open store, each incremented by the code that did the work."""

from __future__ import annotations

import threading

COUNTER_NAMES = (
    "published",
    "publish_failures",
    "bytes_written",
    "loads",
    "hot_loads",
    "load_failures",
    "sections_verified",
    "bytes_verified",
    "corrupt_sections",
    "io_errors",
    "files_quarantined",
    "gc_directories_removed",
    "gc_files_removed",
)


class Counters(dict[str, int]):
    """A mapping of every name in ``COUNTER_NAMES`` to a count since the store was opened."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(COUNTER_NAMES, 0))
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Add ``amount`` to a known counter; KeyError for a name that is not in ``COUNTER_NAMES``."""
        with self._lock:
            self[name] = self[name] + amount
