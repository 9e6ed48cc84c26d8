"""Where blocks lie, what they are called and which may leave: plain dictionaries and numbers, no payload.

Every method expects its caller to hold ``lock``, which is never held over a disk access or the copy of a payload.

A block is open (written by its one owner), or sealed (its bytes never change). A sealed block with a name can be found,
and stays without references until its place is needed; one without a name ends with its last reference. A referenced
block is always in memory. Places in the host pool are taken by the worker thread alone, and given up by it alone where
the block has a name: what it reads there cannot change under it. Who holds which block is in ``runs.py``.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

from redknot.latents.books import MEMORY_COUNTERS, Counters
from redknot.latents.content import Name
from redknot.latents.handles import DEVICE, HOST, PoolFullError
from redknot.latents.policy import Eviction
from redknot.latents.slots import Slots

IN_DEVICE = 1 << DEVICE  # of ``StoredBlock.cached``


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
    name: Name | None
    host: int | None
    lease: float  # when the last lease ends, on the clock of the store; 0: none
    cost: float  # of computing it again

    def __init__(self, namespace: str, device: int | None) -> None:
        """An open block with one reference, that of the run it is made for."""
        self.namespace = namespace
        self.device = device
        self.name = self.host = None
        self.refs = 1
        self.sealed = self.saved = False  # saved: these very bytes were read from the disk tier or written to it
        self.filled = self.pins = 0  # filled: bytes written from the start; what follows is undefined
        self.lease = self.cost = 0.0
        self.cached = 0  # bit ``region``: the policy of that pool holds it, so that it may leave there


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
        self.index: dict[Name, StoredBlock] = {}
        self.policies = (eviction(), eviction())  # device, host: blocks that may leave there
        self.counters = Counters(MEMORY_COUNTERS)
        self._clock = clock
        self._held_below = held_below
        self._leases: list[tuple[float, int, StoredBlock]] = []  # may hold ends that were extended later
        self._lease_numbers = itertools.count()

    def install(self, block: StoredBlock, name: Name | None, cost: float) -> None:
        """Seal a block; with a name, which must be free, it can be found from now on."""
        block.sealed, block.cost, block.name = True, cost, name
        if name is not None:
            self.index[name] = block

    # Places.

    def room(self) -> int:
        """How many blocks could be opened: free places of the device pool, and those that a block may leave."""
        if self._leases:
            self.expire()
        return self.device.free + len(self.policies[DEVICE])

    def take_device(self, count: int) -> list[int]:
        """Slots of the device pool, of blocks that leave it if need be; PoolFullError, which changes nothing."""
        short = count - self.device.free
        if short <= 0:
            return self.device.take_up_to(count)
        if (self._leases or short > len(self.policies[DEVICE])) and count > self.room():
            raise self.pool_full(count)
        return self.device.take_up_to(count) + self._take_over(short)

    def _take_over(self, count: int) -> list[int]:
        """The slots, still live, of blocks that leave the device pool; the caller knows that so many may."""
        slots = []
        index, dropped = self.index, 0
        for victim in self.policies[DEVICE].evict(count):
            slot, name = victim.device, victim.name
            assert slot is not None  # or it would not be in that policy
            slots.append(slot)
            victim.device = None
            victim.cached ^= IN_DEVICE
            if victim.host is None and name is not None:  # as ``_forget`` does it
                del index[name]
                victim.name = None
                if not (victim.saved and self._held_below(name)):
                    dropped += 1
        self.counters["evictions_device"] += count
        self.counters["dropped"] += dropped
        return slots

    def pool_full(self, count: int) -> PoolFullError:
        """What to tell who asks for ``count`` blocks of which there are fewer."""
        room, total = self.room(), self.device.capacity
        asked = f"{count} device blocks are asked for and {room} can be had"
        return PoolFullError(f"{asked}: {total - room} of {total} are in use, pinned or leased")

    def evict_host(self, block: StoredBlock) -> None:
        """Take the place in the host pool from a block that may leave it."""
        self.counters["evictions_host"] += 1
        self.leave(block, HOST)

    def leave(self, block: StoredBlock, region: int) -> None:
        """Give up a block's place in the device or host pool; a block without another place is forgotten."""
        if block.cached >> region & 1:
            block.cached &= ~(1 << region)
            self.policies[region].evicted(block)
        if region == DEVICE:
            slot, block.device = block.device, None
        else:
            slot, block.host = block.host, None
        assert slot is not None  # the caller saw it there, under the lock
        (self.device, self.host)[region].give(slot)
        if block.device is None and block.host is None and block.name is not None:
            self._forget(block)

    def _forget(self, block: StoredBlock) -> None:
        """A block with a name has lost its last place."""
        name = block.name
        assert name is not None  # one without a name has a reference, or is given up
        del self.index[name]
        block.name = None
        if not (block.saved and self._held_below(name)):
            self.counters["dropped"] += 1

    def victim(self, region: int) -> StoredBlock | None:
        """The block to evict from the device or host pool next; None when none can leave."""
        self.expire()
        return self.policies[region].victim()

    def settle(self, block: StoredBlock) -> None:
        """Tell the policies whether a block may leave, after anything that decides it changed."""
        may_leave = places_to_leave(block)
        changed = may_leave ^ block.cached
        block.cached = may_leave
        for region in (DEVICE, HOST):
            if changed >> region & 1:
                if may_leave >> region & 1:
                    self.policies[region].add(block, block.cost)
                else:
                    self.policies[region].discard(block)

    # References; which run has them is in ``runs.py``.

    def hold(self, block: StoredBlock) -> None:
        """One reference more."""
        block.refs += 1
        if block.cached:
            self.settle(block)

    def release(self, block: StoredBlock) -> None:
        """One reference less; a block without a name ends with the last."""
        block.refs -= 1
        if block.refs:
            return
        if block.name is not None:
            self.settle(block)
            return
        for region in (DEVICE, HOST):
            if (block.device, block.host)[region] is not None:
                self.leave(block, region)

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


def places_to_leave(block: StoredBlock) -> int:
    """Bit ``region`` for each pool in which a block is and which it may leave."""
    if block.refs:
        return 0
    device = block.device is not None and not block.pins and not block.lease
    return device << DEVICE | (block.host is not None) << HOST
