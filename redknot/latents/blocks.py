"""Who holds which block, what it is called and where it lies: plain dictionaries and numbers, no payload.

Every method expects its caller to hold ``lock``, which is never held over a disk access or the copy of a payload.

A block is open (written by its one owner), or sealed (its bytes never change). A sealed block with a name can be found,
and stays without references until its place is needed; one without a name ends with its last reference. A referenced
block is always in memory. Places in the host pool are taken by the worker thread alone, and given up by it alone where
the block has a name: what it reads there cannot change under it.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Sequence

from redknot.latents.books import MEMORY_COUNTERS, Counters
from redknot.latents.content import Name
from redknot.latents.handles import (
    DEVICE,
    HOST,
    BlockStateError,
    Handle,
    MovedHandleError,
    PoolFullError,
    Serials,
    describe,
)
from redknot.latents.policy import Eviction
from redknot.latents.slots import Slots


class StoredBlock:
    """One block; ``device`` and ``host`` are slots, of which a live block has at least one."""

    __slots__ = (
        "cached",
        "cost",
        "device",
        "filled",
        "host",
        "lease",
        "name",
        "namespace",
        "pins",
        "refs",
        "saved",
        "sealed",
    )

    def __init__(self, namespace: str, device: int | None) -> None:
        self.namespace = namespace
        self.name: Name | None = None
        self.device = device
        self.host: int | None = None
        self.sealed = False
        self.saved = False  # these very bytes were read from the disk tier or written to it
        self.filled = 0  # bytes written from the start; what follows is undefined
        self.refs = 0
        self.pins = 0
        self.lease = 0.0  # when the last lease ends, on the clock of the store; 0: none
        self.cost = 0.0  # of computing it again
        self.cached = (False, False)  # whether the policies of the device and host pools hold it


class BlockTable:
    """The blocks of one store."""

    def __init__(
        self,
        device: Slots,
        host: Slots,
        eviction: Callable[[], Eviction[StoredBlock]],
        clock: Callable[[], float],
        held_below: Callable[[Name], bool],
    ) -> None:
        self.lock = threading.Lock()
        self.device = device
        self.host = host
        self.refs: dict[int, StoredBlock] = {}  # serial -> block
        self.index: dict[Name, StoredBlock] = {}
        self.policies = (eviction(), eviction())  # device, host: blocks that may leave there
        self.counters = Counters(MEMORY_COUNTERS)
        self.serials = Serials()
        self._nbytes = device.nbytes
        self._clock = clock
        self._held_below = held_below
        self._leases: list[tuple[float, int, StoredBlock]] = []  # may hold ends that were extended later
        self._lease_numbers = itertools.count()

    # References.

    def refer(self, block: StoredBlock) -> Handle:
        """A new reference to a block, and the place it has now."""
        serial = self.serials.next()
        self.refs[serial] = block
        block.refs += 1
        if block.refs == 1:
            self.settle(block)
        if block.device is not None:
            return Handle(DEVICE, block.device * self._nbytes, self._nbytes, serial)
        assert block.host is not None  # a block without a place is not found any more
        return Handle(HOST, block.host * self._nbytes, self._nbytes, serial)

    def of(self, handle: Handle) -> StoredBlock:
        """The block of a live reference, wherever it is; HandleError for any other."""
        block = self.refs.get(handle.serial)
        if block is None:
            raise self.serials.dead(handle)
        return block

    def at(self, handle: Handle) -> StoredBlock:
        """The block of a live reference, if it is where the handle says; HandleError for any other."""
        block = self.of(handle)
        if not self.is_there(block, handle):
            place = "the host pool" if block.device is None else "another place of the device pool"
            raise MovedHandleError(f"{describe(handle)} is in {place} by now; promote it to get its place")
        return block

    def is_there(self, block: StoredBlock, handle: Handle) -> bool:
        """Whether the place that a handle names is one of the block's."""
        slot = (block.device, block.host)[handle.region] if handle.region in (DEVICE, HOST) else None
        return slot is not None and handle[1:3] == (slot * self._nbytes, self._nbytes)

    def drop(self, handle: Handle) -> None:
        """End a reference; HandleError for one that is not alive."""
        block = self.refs.pop(handle.serial, None)
        if block is None:
            raise self.serials.dead(handle)
        block.refs -= 1
        if block.refs:
            return
        if block.name is None:
            self._give_up(block)
        else:
            self.settle(block)

    def match(self, names: Sequence[Name]) -> list[Handle | None]:
        """A reference for every name that is in the device pool, None for the others."""
        found: list[Handle | None] = []
        for name in names:
            block = self.index.get(name)
            found.append(None if block is None or block.device is None else self.refer(block))
        return found

    # Contents.

    def open(self, namespace: str) -> Handle:
        """A reference to a new open block in the device pool; PoolFullError when nothing there can leave."""
        return self.refer(StoredBlock(namespace, self.take_device()))

    def open_block(self, handle: Handle) -> StoredBlock:
        """The open block of its only reference; BlockStateError for a sealed or shared one."""
        block = self.at(handle)
        if block.sealed:
            raise BlockStateError(f"{describe(handle)} is sealed; writable() gives a block to write")
        if block.refs > 1:
            raise BlockStateError(f"{describe(handle)} has {block.refs} references; writable() gives one of its own")
        return block

    def reopen(self, handle: Handle) -> None:
        """Open the nameless block of its only reference; what the worker copied or copies of it is worth nothing."""
        old = self.at(handle)
        if old.sealed:
            block = StoredBlock(old.namespace, old.device)
            block.filled, block.refs = old.filled, 1
            self.refs[handle.serial] = block
            old.device, old.refs = None, 0
            if old.host is not None:
                self.leave(old, HOST)

    def install(self, block: StoredBlock, name: Name | None, cost: float) -> None:
        """Seal a block; with a name, which must be free, it can be found from now on."""
        block.sealed, block.cost, block.name = True, cost, name
        if name is not None:
            self.index[name] = block

    def merge(self, handle: Handle, held: Handle) -> Handle:
        """Let the owner of an open block share the equal block of ``held``; both handles end, one is returned.

        Where the equal block is not in the device pool, it takes over the place of the open one.
        """
        block, other = self.of(handle), self.of(held)
        if other.device is None:
            other.device, block.device, other.filled = block.device, None, block.filled
        self.drop(handle)
        shared = self.refer(other)
        self.drop(held)
        self.counters["shares"] += 1
        return shared

    # Places.

    def take_device(self) -> int:
        """A slot of the device pool, evicting a block if need be; PoolFullError when none can leave."""
        slot = self.device.take()
        if slot is None:
            victim = self.victim(DEVICE)
            if victim is None:
                raise PoolFullError(f"all {self.device.capacity} device blocks are in use, pinned or leased")
            self.evict(victim, DEVICE)
            slot = self.device.take()
            assert slot is not None
        return slot

    def evict(self, block: StoredBlock, region: int) -> None:
        """Take the place in the device or host pool from a block that may leave it."""
        self.policies[region].evicted(block)
        if region == DEVICE:
            block.cached = (False, block.cached[HOST])
            self.counters["evictions_device"] += 1
        else:
            block.cached = (block.cached[DEVICE], False)
            self.counters["evictions_host"] += 1
        self.leave(block, region)

    def leave(self, block: StoredBlock, region: int) -> None:
        """Give up a block's place in the device or host pool; a block without another place is forgotten."""
        if region == DEVICE:
            slot, block.device = block.device, None
        else:
            slot, block.host = block.host, None
        assert slot is not None  # the caller saw it there, under the lock
        (self.device, self.host)[region].give(slot)
        if block.device is None and block.host is None and block.name is not None:
            del self.index[block.name]
            self.counters["dropped"] += not (block.saved and self._held_below(block.name))
            block.name = None
        self.settle(block)

    def victim(self, region: int) -> StoredBlock | None:
        """The block to evict from the device or host pool next; None when none can leave."""
        self.expire()
        return self.policies[region].victim()

    def settle(self, block: StoredBlock) -> None:
        """Tell the policies whether a block may leave, after anything that decides it changed."""
        idle = block.refs == 0
        device = idle and block.device is not None and not block.pins and not block.lease
        host = idle and block.host is not None
        was_device, was_host = block.cached
        if device != was_device:
            self._tell(DEVICE, block, device)
        if host != was_host:
            self._tell(HOST, block, host)
        block.cached = (device, host)

    def _tell(self, region: int, block: StoredBlock, may_leave: bool) -> None:
        if may_leave:
            self.policies[region].add(block, block.cost)
        else:
            self.policies[region].discard(block)

    # Pins and leases.

    def lease(self, block: StoredBlock, seconds: float) -> None:
        """Keep a block in the device pool for some seconds, or as long as an earlier lease says if that is longer."""
        until = self._clock() + seconds
        if until > block.lease:
            block.lease = until
            heapq.heappush(self._leases, (until, next(self._lease_numbers), block))
            self.settle(block)

    def expire(self) -> None:
        """End the leases whose time is over."""
        now = self._clock() if self._leases else 0.0
        while self._leases and self._leases[0][0] <= now:
            block = heapq.heappop(self._leases)[2]
            if block.lease and block.lease <= now:
                block.lease = 0.0
                self.settle(block)

    def _give_up(self, block: StoredBlock) -> None:
        """The last reference to a block without a name ended."""
        for region in (DEVICE, HOST):
            if (block.device, block.host)[region] is not None:
                self.leave(block, region)
