"""The latent store: blocks of equal size, found by content, shared, copied on write, and kept in three tiers.

Blocks are held in runs: ``match`` gives a run of those that are known by their names, ``open`` puts open ones where one
is missing and behind, ``allocate`` gives a run of open ones. Their owner fills them (``append``, or ``fill`` and typed
views, by the handle of each) and seals them, by content (``seal``) or by names that say what they hold (``commit``).
From then on their bytes never change, whoever asks for their names gets a reference, and they stay while a run holds
them. Without references a block is cache: it leaves the device pool for the host pool and the disk when room is needed,
in the order of a policy.

A run is one reference to each of its blocks, and freed once as a whole; a handle says where one of its blocks is. Safe
to use from threads, a run by one at a time; no call waits for a disk but ``fetch`` and ``promote``, which read, and
``flush``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import torch
from torch import Tensor

from redknot.latents.arena import Arena, Arenas
from redknot.latents.blocks import StoredBlock
from redknot.latents.books import Book
from redknot.latents.content import Hasher, Name, caller_name, content_hash, content_name
from redknot.latents.disk import DiskTier
from redknot.latents.handles import DEVICE, BlockStateError, Handle, Match, MovedHandleError, Outcome, Sealed, describe
from redknot.latents.moves import Moves
from redknot.latents.policy import POLICIES, Eviction
from redknot.latents.pool import Pool, same_bytes
from redknot.latents.recount import recount
from redknot.latents.references import References
from redknot.latents.runs import Held, RunTable
from redknot.latents.settings import StoreConfig
from redknot.latents.tiers import Tiers

_log = logging.getLogger(__name__)

WAIT_S = 60.0  # for tiers below the device pool


class LatentStore(References):
    """See the module. ``clock`` counts seconds of leases.

    ``eviction`` makes a policy for each tier in memory, instead of that of the configuration.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        hasher: Hasher = content_hash,
        eviction: Callable[[], Eviction[StoredBlock]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocate the pools and open the disk tier; StoreError when its folder cannot be used."""
        nbytes = config.block_bytes
        device = torch.device(config.device)
        self.config = config
        self._hash = hasher
        self._device = Pool(config.device_bytes // nbytes, nbytes, device)
        self._host = Pool(config.host_bytes // nbytes, nbytes, torch.device("cpu"), pinned=device.type == "cuda")
        self._disk = None
        if config.disk_bytes and config.disk_folder is not None:
            self._disk = DiskTier(config.disk_folder, config.layout, nbytes, config.disk_bytes)
        policy = eviction or POLICIES[config.eviction]
        table = RunTable(self._device.slots, self._host.slots, policy, clock, self._on_disk)
        self._moves = Moves(table, self._device, self._host, self._disk)
        self._arenas = Arenas(config.arenas, config.arena_bytes, device, table.serials)
        super().__init__(table, Tiers(table, self._moves, config.queue))

    # The data path.

    @property
    def pool(self) -> Tensor:
        """The bytes of the device pool, [capacity, block_bytes] uint8, to make typed views of.

        A handle's offset is counted from its start. Only what a handle names may be touched, and only while its run
        lives: written by the owner of an open block, read by every holder.
        """
        return self._device.data

    def append(self, handle: Handle, data: Tensor) -> None:
        """Write uint8 [n] behind what was written of an open block; BlockStateError when it does not fit."""
        with self._table.lock:
            block = self._table.open_block(handle)
            start, end = block.filled, block.filled + len(data)
            if end > self.config.block_bytes:
                raise BlockStateError(f"{len(data)} bytes do not fit behind {start} of {self.config.block_bytes}")
            block.filled = end
        self._row(handle)[start:end].copy_(data)

    def fill(self, handle: Handle) -> Tensor:
        """The bytes of an open block to write in any order, [block_bytes] uint8; what was not written yet is zero."""
        with self._table.lock:
            self._moves.complete(self._table.open_block(handle))
        return self._row(handle)

    def view(self, handle: Handle) -> Tensor:
        """The bytes of a block to read while its run lives: all of a sealed one, what an open one has."""
        with self._table.lock:
            block = self._table.at(handle)
            if block.sealed:
                self._moves.complete(block)
            return self._row(handle)[: block.filled]

    def writable(self, handle: Handle) -> Handle:
        """Let a run have an open block of its own with the same bytes in the place of this one; where that is.

        It is the same block where nobody else can see it (one reference, no name to be found under) and the device pool
        has it. PoolFullError without room for a copy; nothing changes then.
        """
        table = self._table
        with table.lock:
            block = table.at(handle)
            if block.refs == 1 and block.name is None and block.device is not None:
                table.reopen(handle)
                return handle
            aside = Held([], [])
            table.open(aside, block.namespace, 1)
            run = table.start(aside)
            [copy] = aside.blocks
            assert copy is not None  # it was opened just now
            slot = copy.device
            assert slot is not None
            copy.filled = block.filled
            table.counters["copies"] += 1
        self._device.row(slot).copy_(self._row(handle))
        with table.lock:
            try:
                if table.at(handle) is not block:  # somebody else used the run meanwhile
                    raise MovedHandleError(f"{describe(handle)} names another block by now; ask for its handle")
                table.hold(copy)
                table.put(table.held(handle.run), handle.number, copy)
            finally:
                table.drop(run)
            return table.handle(handle.run, handle.number)

    def seal(self, handle: Handle, *, key: bytes | None = None, cost: float = 1.0) -> Sealed:
        """End the writing of a block, and share an equal one under the same name if there is one.

        The name is the hash of the bytes, or the caller's ``key``. Other bytes under that name are a collision: it is
        counted, and the block stays the run's alone. ``cost`` is what computing the block again would take, in a unit
        that all callers share.
        """
        table = self._table
        with table.lock:
            block = table.open_block(handle)
            self._moves.complete(block)
        if key is None:
            name = content_name(block.namespace, self._hash(self._device.bytes_of(self._slot(handle))))
        else:
            name = caller_name(block.namespace, key)
        with table.lock:
            other = table.index.get(name)
            if other is None:
                return self._seal(handle, name, cost)
            table.hold(other)
            self._moves.complete(other)
            run = table.start(Held([other], []))  # so that it stays where it is while it is read
            there = table.handle(run, 0)
        pool = self._device if there.region == DEVICE else self._host
        same = same_bytes(self._device, self._slot(handle), pool, self._slot(there))
        with table.lock:
            try:
                if same:
                    table.open_block(handle)
                    table.share(table.held(handle.run), handle.number, other)
                    return Sealed(table.handle(handle.run, handle.number), Outcome.SHARED)
                found = self._seal(handle, None, cost)
            finally:
                table.drop(run)
        _log.warning("two contents of namespace %r have one name; the second is not shared", block.namespace)
        return found

    def _seal(self, handle: Handle, name: Name | None, cost: float) -> Sealed:
        """Seal a block under a name that is free, or under none; the caller holds the lock."""
        table = self._table
        table.install(table.open_block(handle), name, cost)
        table.counters["dedup_collisions" if name is None else "installs"] += 1
        return Sealed(handle, Outcome.COLLIDED if name is None else Outcome.INSTALLED)

    def arena(self) -> Arena:
        """Room for the state of one request, to be closed by it; PoolFullError when all arenas are taken."""
        return self._arenas.take()

    # Tiers.

    def fetch(self, names: Sequence[Name], timeout_s: float = WAIT_S) -> Match:
        """Like ``match``, and what is in the tiers below is promoted first; missing is what is not there in time."""
        return self._tiers.fetch(names, timeout_s)

    def prefetch(self, names: Sequence[Name]) -> int:
        """Ask for promotion of what is in the tiers below; returns how many requests the queue took, never waiting."""
        return self._tiers.prefetch(names)

    def demote(self, handle: Handle) -> bool:
        """Ask the worker to move a sealed block of one reference to the host pool; False when its queue is full.

        Its run lives on. Once the block has moved, only ``promote`` takes the handle. Where the host pool has no room
        the block stays. BlockStateError for a block that is open, shared, pinned or leased.
        """
        return self._tiers.demote(handle)

    def promote(self, handle: Handle, timeout_s: float = WAIT_S) -> Handle:
        """Bring a block of a run back into the device pool; where it is then.

        PoolFullError when there was no room in time; the block then stays where it is.
        """
        return self._tiers.promote(handle, timeout_s)

    def shrink(self, blocks: int) -> bool:
        """Ask the worker to demote so many cached blocks; False when its queue is full."""
        return self._tiers.shrink(blocks)

    def flush(self, timeout_s: float = WAIT_S) -> bool:
        """Write every named block to the disk tier; whether it was done in time. What the disk refuses is counted."""
        return self._tiers.flush(timeout_s)

    def drain(self, timeout_s: float = WAIT_S) -> bool:
        """Wait until no move is waiting or running; whether that was so in time."""
        return self._tiers.drain(timeout_s)

    def close(self, timeout_s: float = WAIT_S) -> None:
        """End the worker; what is only in memory is lost (``flush`` saves it). StoreError if the disk hangs."""
        self._tiers.close(timeout_s)

    # Books.

    def books(self) -> dict[str, Book]:
        """The bytes of every tier: free + live + quarantined = total."""
        with self._table.lock:
            found = {"device": self._device.slots.book(), "host": self._host.slots.book()}
        found["arena"] = self._arenas.book()
        if self._disk is not None:
            found["disk"] = self._disk.book()
        return found

    def counters(self) -> dict[str, int]:
        """Everything that happened since the store was opened."""
        with self._table.lock:
            found = dict(self._table.counters)
        return found | (self._disk.counts() if self._disk is not None else {})

    def recount(self) -> list[str]:
        """Walk over everything and name each difference from the books; an empty list when they balance."""
        return recount(self._table, self._moves) + self._arenas.recount() + (self._disk.recount() if self._disk else [])

    def _row(self, handle: Handle) -> Tensor:
        """The bytes at a handle's place, which the caller has checked."""
        pool = self._device if handle.region == DEVICE else self._host
        return pool.row(self._slot(handle))

    def _slot(self, handle: Handle) -> int:
        return handle.offset // self.config.block_bytes

    def _on_disk(self, name: Name) -> bool:
        return self._disk is not None and self._disk.holds(name)

    def __enter__(self) -> LatentStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
