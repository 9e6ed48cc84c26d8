"""The policy path of the latent store: references and names. No payload moves and no tensor is touched."""

from __future__ import annotations

from collections.abc import Sequence

from redknot.errors import StoreError
from redknot.latents.blocks import BlockTable, StoredBlock
from redknot.latents.content import Name, caller_name
from redknot.latents.handles import DEVICE, BlockStateError, Handle
from redknot.latents.tiers import Tiers


class References:
    """What can be done with blocks without their bytes; safe to use from threads."""

    def __init__(self, table: BlockTable, tiers: Tiers) -> None:
        self._table = table
        self._tiers = tiers

    def match(self, names: Sequence[Name]) -> list[Handle | None]:
        """A reference for every name that is in the device pool, None for the others."""
        table = self._table
        with table.lock:
            found = table.match(names)
            hits = len(found) - found.count(None)
            table.counters["hits"] += hits
            table.counters["misses"] += len(found) - hits
        return found

    def allocate(self, namespace: str) -> Handle:
        """An open block, its bytes undefined.

        PoolFullError when every device block is in use, pinned or leased; StoreError once the store is closed.
        """
        table = self._table
        with table.lock:
            handle = table.open(namespace)
            table.counters["allocations"] += 1
            low = self._tiers.must_reclaim()
        if low:
            try:
                self._tiers.reclaim()
            except StoreError:
                self.free(handle)
                raise
        return handle

    def room(self) -> int:
        """How many blocks could be allocated now: free places of the device pool, and those that a block may leave."""
        table = self._table
        with table.lock:
            table.expire()
            return table.device.free + len(table.policies[DEVICE])

    def check(self, handles: Sequence[Handle]) -> None:
        """HandleError unless every reference is alive and its block where the handle says."""
        table = self._table
        with table.lock:
            for handle in handles:
                table.at(handle)

    def fork(self, handle: Handle) -> Handle:
        """Another reference to the same block; whoever wants to write asks ``writable`` first."""
        table = self._table
        with table.lock:
            forked = table.refer(table.at(handle))
            table.counters["forks"] += 1
        return forked

    def free(self, handle: Handle) -> None:
        """End a reference, wherever its block is; HandleError when that was done before."""
        table = self._table
        with table.lock:
            table.drop(handle)
            table.counters["frees"] += 1

    def commit(self, handle: Handle, key: bytes, cost: float = 1.0) -> Handle:
        """Seal an open block under the caller's word that ``key`` says what it holds; its bytes are not looked at.

        Like ``seal`` otherwise: the handle that is returned replaces the given one.
        """
        table = self._table
        with table.lock:
            block = table.open_block(handle)
            name = caller_name(block.namespace, key)
            other = table.index.get(name)
            if other is not None:
                return table.merge(handle, table.refer(other))
            table.install(block, name, cost)
            table.counters["installs"] += 1
        return handle

    def pin(self, name: Name) -> bool:
        """Keep a block in the device pool until ``unpin``; False when it is not there."""
        with self._table.lock:
            block = self._resident(name)
            if block is not None:
                block.pins += 1
                self._table.settle(block)
            return block is not None

    def unpin(self, name: Name) -> None:
        """Undo one ``pin``; BlockStateError when there is none."""
        with self._table.lock:
            block = self._resident(name)
            if block is None or not block.pins:
                raise BlockStateError(f"a block of namespace {name.namespace!r} is unpinned more often than pinned")
            block.pins -= 1
            self._table.settle(block)

    def lease(self, name: Name, seconds: float) -> bool:
        """Keep a block in the device pool for some seconds from now; False when it is not there."""
        with self._table.lock:
            block = self._resident(name)
            if block is not None:
                self._table.lease(block, seconds)
            return block is not None

    def _resident(self, name: Name) -> StoredBlock | None:
        self._table.expire()
        block = self._table.index.get(name)
        return None if block is None or block.device is None else block
