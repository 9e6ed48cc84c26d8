"""The books of a tier in bytes, and counters that the code which did the work increments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MEMORY_COUNTERS = (
    "allocations",
    "frees",
    "hits",  # names found in the device pool
    "hits_below",  # names found in the host pool or on disk, and promoted
    "misses",
    "installs",  # sealed blocks that became findable
    "shares",  # sealed blocks that were there already, whose slot was freed
    "dedup_collisions",  # equal names, other bytes: a security signal
    "forks",
    "copies",  # copy-on-write
    "evictions_device",  # device places given up because a slot was needed at once
    "evictions_host",
    "dropped",  # contents that left memory and were in no tier below
    "demotions_host",
    "demotions_disk",
    "demotions_refused",  # the queue was full, or the tier below had no room
    "promotions_host",  # from the host pool into the device pool
    "promotions_disk",
    "promotions_refused",
    "copy_errors",  # a copy between tiers failed; the place it went to is quarantined
)
DISK_COUNTERS = (
    "disk_reads",
    "disk_misses",
    "disk_writes",
    "disk_present",  # writes that found the same bytes there
    "disk_collisions",  # writes that found other bytes there; theirs stay
    "disk_full",  # writes that found no room within the budget
    "disk_evictions",
    "disk_vanished",  # files that another process removed
    "disk_quarantined",
    "disk_foreign",  # things in the folder that no store wrote, seen at a scan
    "disk_left_over",  # unfinished files of dead processes, removed
    "io_errors",
)


class Counters(dict[str, int]):
    """A mapping of fixed names to counts; whoever increments holds the lock of what is counted."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(dict.fromkeys(names, 0))


@dataclass(frozen=True)
class Book:
    """Bytes of one tier. ``free`` is negative where other processes overran the budget of a shared folder."""

    total: int
    live: int
    quarantined: int

    @property
    def free(self) -> int:
        """Bytes that may still be taken: free + live + quarantined = total."""
        return self.total - self.live - self.quarantined


def differences(what: str, counted: object, found: object) -> list[str]:
    """One line where the books and a walk over everything disagree, none where they agree."""
    return [] if counted == found else [f"{what}: the books say {counted}, a recount finds {found}"]
