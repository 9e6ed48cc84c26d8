"""The latent store: blocks of equal size, found by content, shared, copied on write, and kept in three tiers.

The life of a block: ``allocate`` gives an open one; its owner fills it (``append``, or ``fill`` and typed views) and
seals it, by its content (``seal``) or by a key that says what it holds (``commit``). From then on its bytes never
change, whoever asks for its name gets a reference, and it stays while somebody holds one. Without references it is
cache: it leaves the device pool for the host pool and the disk when room is needed, in the order of a policy.

Handles are references, one for each holder; every one is freed once. Safe to use from threads; no call waits for a disk
but ``fetch`` and ``promote``, which read, and ``flush``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import torch
from torch import Tensor

from redknot.latents.arena import Arena, Arenas
from redknot.latents.blocks import BlockTable, StoredBlock
from redknot.latents.books import Book
from redknot.latents.content import Hasher, Name, caller_name, content_hash, content_name
from redknot.latents.disk import DiskTier
from redknot.latents.handles import DEVICE, BlockStateError, Handle
from redknot.latents.moves import Moves
from redknot.latents.policy import Eviction, Lru
from redknot.latents.pool import Pool, host_bytes, same_bytes
from redknot.latents.recount import recount
from redknot.latents.references import References
from redknot.latents.settings import StoreConfig
from redknot.latents.tiers import Tiers

_log = logging.getLogger(__name__)

WAIT_S = 60.0  # for tiers below the device pool


class LatentStore(References):
    """See the module. ``clock`` counts seconds of leases; ``eviction`` makes a policy for each tier in memory."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        hasher: Hasher = content_hash,
        eviction: Callable[[], Eviction[StoredBlock]] = Lru,
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
        table = BlockTable(self._device.slots, self._host.slots, eviction, clock, self._on_disk)
        self._moves = Moves(table, self._device, self._host, self._disk)
        self._arenas = Arenas(config.arenas, config.arena_bytes, device, table.serials)
        super().__init__(table, Tiers(table, self._moves, config.queue))

    # The data path.

    @property
    def pool(self) -> Tensor:
        """The bytes of the device pool, [capacity, block_bytes] uint8, to make typed views of.

        A handle's offset is counted from its start. Only what a handle names may be touched, and only while the
        reference lives: written by the owner of an open block, read by every holder.
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
        """The bytes of a block to read while the reference lives: all of a sealed one, what an open one has."""
        with self._table.lock:
            block = self._table.at(handle)
            if block.sealed:
                self._moves.complete(block)
            return self._row(handle)[: block.filled]

    def writable(self, handle: Handle) -> Handle:
        """An open block of the caller's own with the same bytes, which replaces the given handle.

        It is the same handle where nobody else can see the block: one reference, and no name to be found under.
        PoolFullError without room for a copy; the given handle then stays.
        """
        table = self._table
        with table.lock:
            block = table.at(handle)
            if block.refs == 1 and block.name is None:
                table.reopen(handle)
                return handle
            copy = table.open(block.namespace)
            table.of(copy).filled = block.filled
            table.counters["copies"] += 1
        self._row(copy).copy_(self._row(handle))
        with table.lock:
            table.drop(handle)
        return copy

    def seal(self, handle: Handle, *, key: bytes | None = None, cost: float = 1.0) -> Handle:
        """End the writing of a block, and share an equal one under the same name if there is one.

        The name is the hash of the bytes, or the caller's ``key``. The handle that is returned replaces the given one:
        it is the same, or a reference to the equal block. Other bytes under that name are a collision: it is counted,
        and the block stays the caller's alone. ``cost`` is what computing the block again would take, in any unit.
        """
        table = self._table
        with table.lock:
            block = table.open_block(handle)
            self._moves.complete(block)
        row = self._row(handle)
        if key is None:
            name = content_name(block.namespace, self._hash(host_bytes(row)))
        else:
            name = caller_name(block.namespace, key)
        with table.lock:
            other = table.index.get(name)
            if other is None:
                table.install(block, name, cost)
                table.counters["installs"] += 1
                return handle
            held = table.refer(other)  # so that it stays where it is while it is read
            self._moves.complete(other)
        same = same_bytes(row, self._row(held))
        with table.lock:
            if same:
                return table.merge(handle, held)
            table.drop(held)
            table.install(block, None, cost)
            table.counters["dedup_collisions"] += 1
        _log.warning("two contents of namespace %r have one name; the second is not shared", block.namespace)
        return handle

    def arena(self) -> Arena:
        """Room for the state of one request, to be closed by it; PoolFullError when all arenas are taken."""
        return self._arenas.take()

    # Tiers.

    def fetch(self, names: Sequence[Name], timeout_s: float = WAIT_S) -> list[Handle | None]:
        """Like ``match``, and what is in the tiers below is promoted first; None for what is not there in time."""
        return self._tiers.fetch(names, timeout_s)

    def prefetch(self, names: Sequence[Name]) -> int:
        """Ask for promotion of what is in the tiers below; returns how many requests the queue took, never waiting."""
        return self._tiers.prefetch(names)

    def demote(self, handle: Handle) -> bool:
        """Ask the worker to move a sealed block of one reference to the host pool; False when its queue is full.

        The reference lives on. Once the block has moved, only ``promote`` and ``free`` take the handle. Where the host
        pool has no room the block stays. BlockStateError for a block that is open, shared, pinned or leased.
        """
        return self._tiers.demote(handle)

    def promote(self, handle: Handle, timeout_s: float = WAIT_S) -> Handle:
        """Bring the block of a reference back; the handle that is returned replaces the given one.

        PoolFullError when there was no room in the device pool in time; the given handle then stays.
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
        return pool.row(handle.offset // self.config.block_bytes)

    def _on_disk(self, name: Name) -> bool:
        return self._disk is not None and self._disk.holds(name)

    def __enter__(self) -> LatentStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
