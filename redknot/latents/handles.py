"""Handles: how the latent store is spoken to. No addresses and no slot numbers cross its interface.

A *run* is one reference to any number of blocks, side by side: a request holds a few runs, not hundreds of blocks. Its
serial is issued once and never again, so that whoever frees twice, reads behind a free, or brings a run of another
store is told. A *handle* names a place (a region of the store, a byte offset in it, a length) and whose it is: block
``number`` of a run. It is good for as long as that run has a block in that place.
"""

from __future__ import annotations

import itertools
import secrets
from enum import StrEnum
from typing import NamedTuple

from redknot.errors import StoreError

# Indices into the table of regions that a store owns.
DEVICE, HOST, ARENA = range(3)
REGION_NAMES = ("device", "host", "arena")

_SERIAL_BITS = 40
_STORE_BITS = 22  # serials stay below 2**62: one machine word, in Python's own representation two digits less
_STORES = itertools.count(secrets.randbits(_STORE_BITS))


class HandleError(StoreError):
    """A handle that may not be used as it was."""


class StaleHandleError(HandleError):
    """The run was freed."""


class ForeignHandleError(HandleError):
    """The handle was issued by another store, or by none."""


class MovedHandleError(HandleError):
    """The run lives, but its block is elsewhere by now: demoted, perhaps promoted again, shared, or copied."""


class BlockStateError(StoreError):
    """The block cannot take this operation: sealed, shared, full, pinned, not sealed, or not there yet."""


class PoolFullError(StoreError):
    """Every block of the device pool is in use, or every arena is."""


class ArenaFullError(StoreError):
    """A request needs more state than its arena has bytes."""


class Run(NamedTuple):
    """One reference to blocks in a row, freed once."""

    serial: int


class Handle(NamedTuple):
    """``length`` bytes that begin ``offset`` bytes into a region of one store: block ``number`` of a run."""

    region: int
    offset: int
    length: int
    run: Run
    number: int = 0


class Match(NamedTuple):
    """What was found: a run with a block for each name that was asked for, and the numbers of those not there."""

    run: Run
    missing: list[int]


class Outcome(StrEnum):
    """What became of a block that was sealed."""

    INSTALLED = "installed"  # it can be found under its name from now on
    SHARED = "shared"  # an equal block was there under its name; the run holds that one now
    COLLIDED = "collided"  # other bytes were there under its name; it has none, and is the run's alone


class Sealed(NamedTuple):
    """Where a block is that was sealed, and what became of it."""

    handle: Handle
    outcome: Outcome


class Serials:
    """The serials of one store: its own tag in the high bits, then 1, 2, 3, ..."""

    def __init__(self) -> None:
        self._tag = next(_STORES) % (1 << _STORE_BITS)
        self._numbers = itertools.count((self._tag << _SERIAL_BITS) + 1)
        self.next = self._numbers.__next__  # called on the fast path

    def dead(self, run: Run) -> HandleError:
        """Why a run is not alive here."""
        if run.serial >> _SERIAL_BITS != self._tag:
            return ForeignHandleError(f"{describe(run)} was not issued by this store")
        return StaleHandleError(f"{describe(run)} was freed")


def describe(what: Run | Handle) -> str:
    """ "run 7", or "block 0 of run 7 (device, bytes 4096 to 8192)"."""
    if isinstance(what, Run):
        return f"run {what.serial & ((1 << _SERIAL_BITS) - 1)}"
    region = REGION_NAMES[what.region] if 0 <= what.region < len(REGION_NAMES) else f"region {what.region}"
    place = f"{region}, bytes {what.offset} to {what.offset + what.length}"
    return f"block {what.number} of {describe(what.run)} ({place})"
