"""Handles: how the latent store is spoken to. No addresses and no slot numbers cross its interface.

A handle names a place (a region of the store, a byte offset in it, a length) and one *reference*: its serial is issued
once and never again, so that whoever frees twice, reads behind a free, or brings a handle of another store is told.
"""

from __future__ import annotations

import itertools
import secrets
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
    """The reference was freed, or replaced by the handle that an operation returned."""


class ForeignHandleError(HandleError):
    """The handle was issued by another store, or by none."""


class MovedHandleError(HandleError):
    """The reference lives, but its block is elsewhere by now: it was demoted, and perhaps promoted again."""


class BlockStateError(StoreError):
    """The block cannot take this operation: sealed, shared, full, pinned or not sealed."""


class PoolFullError(StoreError):
    """Every block of the device pool is in use, or every arena is."""


class ArenaFullError(StoreError):
    """A request needs more state than its arena has bytes."""


class Handle(NamedTuple):
    """One reference to ``length`` bytes that begin ``offset`` bytes into a region of one store."""

    region: int
    offset: int
    length: int
    serial: int


class Serials:
    """The serials of one store: its own tag in the high bits, then 1, 2, 3, ..."""

    def __init__(self) -> None:
        self._tag = next(_STORES) % (1 << _STORE_BITS)
        self._numbers = itertools.count((self._tag << _SERIAL_BITS) + 1)
        self.next = self._numbers.__next__  # called on the fast path

    def dead(self, handle: Handle) -> HandleError:
        """Why a handle has no live reference here."""
        if handle.serial >> _SERIAL_BITS != self._tag:
            return ForeignHandleError(f"{describe(handle)} was not issued by this store")
        return StaleHandleError(f"{describe(handle)} was freed, or replaced by a handle that was returned later")


def describe(handle: Handle) -> str:
    """ "handle 7 (device, bytes 4096 to 8192)"."""
    region = REGION_NAMES[handle.region] if 0 <= handle.region < len(REGION_NAMES) else f"region {handle.region}"
    number = handle.serial & ((1 << _SERIAL_BITS) - 1)
    return f"handle {number} ({region}, bytes {handle.offset} to {handle.offset + handle.length})"
