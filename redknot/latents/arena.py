"""Room for the state of requests (sliding windows, open tails): one arena a request, filled upwards, freed as one."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from redknot.latents.books import Book, differences
from redknot.latents.handles import (
    ARENA,
    ArenaFullError,
    Handle,
    PoolFullError,
    Run,
    Serials,
    StaleHandleError,
)
from redknot.latents.pool import Pool

ALIGNMENT = 16  # bytes; what layout.py aligns regions to


class Arenas:
    """``count`` arenas of ``nbytes`` bytes each: the budget is theirs, whether or not it is used."""

    def __init__(self, count: int, nbytes: int, device: torch.device, serials: Serials) -> None:
        self.pool = Pool(count, nbytes, device)
        self.lock = threading.Lock()
        self.serials = serials
        self.open: dict[int, Arena] = {}  # by slot

    def take(self) -> Arena:
        """An arena for one request; PoolFullError when all are taken."""
        with self.lock:
            slot = self.pool.slots.take()
            if slot is None:
                raise PoolFullError(f"all {self.pool.slots.capacity} arenas are in use")
            self.open[slot] = Arena(self, slot)
            return self.open[slot]

    def book(self) -> Book:
        """Bytes of all arenas, used or not."""
        with self.lock:
            return self.pool.slots.book()

    def recount(self) -> list[str]:
        """Differences between the books and a walk over the open arenas."""
        with self.lock:
            found = self.pool.slots.recount("arena", list(self.open))
            for slot, arena in self.open.items():
                found += differences(f"arena {slot} bytes", arena.used, arena.end_of_spans())
            return found


class Arena:
    """The state of one request; a context manager that frees it. One thread at a time uses it."""

    def __init__(self, arenas: Arenas, slot: int) -> None:
        self._arenas = arenas
        self._slot: int | None = slot
        self._row = arenas.pool.row(slot)
        self._spans: dict[int, Handle] = {}
        self.used = 0  # bytes, alignment included

    def allocate(self, nbytes: int) -> Handle:
        """The next ``nbytes`` bytes, aligned to ``ALIGNMENT``; they are undefined, and the system's until written.

        Nothing is zeroed: a request that keeps few of its window rows would pay for all of them. That it reads what it
        wrote and nothing else is held by tests that run on memory full of NaN. ArenaFullError when they do not fit,
        StaleHandleError after close.
        """
        slot = self._open_slot()
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        total = len(self._row)
        if nbytes <= 0 or start + nbytes > total:
            raise ArenaFullError(
                f"{nbytes} bytes do not fit into an arena of {total} bytes that has {total - start} left"
            )
        handle = Handle(ARENA, slot * total + start, nbytes, Run(self._arenas.serials.next()))
        self._spans[handle.run.serial] = handle
        self.used = start + nbytes
        return handle

    def view(self, handle: Handle) -> Tensor:
        """The bytes of a handle of this arena, [length] uint8, valid until close; HandleError for any other."""
        slot = self._open_slot()
        if self._spans.get(handle.run.serial) != handle:
            raise self._arenas.serials.dead(handle.run)
        start = handle.offset - slot * len(self._row)
        return self._row[start : start + handle.length]

    def close(self) -> None:
        """Free everything at once; StaleHandleError when that was done before."""
        slot = self._open_slot()
        with self._arenas.lock:
            self._slot = None
            self._spans.clear()
            del self._arenas.open[slot]
            self._arenas.pool.slots.give(slot)

    def end_of_spans(self) -> int:
        """The bytes in use, counted from the handles."""
        start = (self._slot or 0) * len(self._row)
        return max((span.offset + span.length - start for span in self._spans.values()), default=0)

    def _open_slot(self) -> int:
        if self._slot is None:
            raise StaleHandleError("the arena was closed; its request has ended")
        return self._slot

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
