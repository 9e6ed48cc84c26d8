"""How blocks move between the device pool, the host pool and the disk tier; all of it on the thread of one worker.

The lock of the table is never held over a copy or a disk access. A place that something is copied *to* belongs to the
worker until it is done. A place in the device pool that something is copied *from* may be evicted and overwritten
meanwhile, because no allocation waits for a move: the worker looks again afterwards, and then what it copied is thrown
away. A place in the host pool is safe to read, because nobody else takes places there (``blocks.py``).
"""

from __future__ import annotations

from torch import Tensor

from redknot.latents.blocks import StoredBlock
from redknot.latents.content import Name
from redknot.latents.disk import DiskTier, Written
from redknot.latents.handles import DEVICE, HOST, Handle, PoolFullError, Run
from redknot.latents.pool import Pool, host_bytes, own_memory
from redknot.latents.runs import Held, RunTable


class Moves:
    """The moves of one store; one thread at a time calls its methods."""

    def __init__(self, table: RunTable, device: Pool, host: Pool, disk: DiskTier | None) -> None:
        self.transit: set[tuple[int, int]] = set()  # region and slot of what is being copied to
        self.asked: dict[tuple[Run, int], StoredBlock] = {}  # blocks of runs that are to be demoted
        self.disk = disk
        self._table = table
        self._device = device
        self._host = host
        self._staging = own_memory(device.slots.nbytes)

    # Down.

    def reclaim(self, free: int) -> bool:
        """Demote blocks until ``free`` slots of the device pool are free; False when nothing more can be demoted."""
        table = self._table
        refused: StoredBlock | None = None
        while True:
            with table.lock:
                block = table.victim(DEVICE)
                if self._device.slots.free >= free:
                    return True
                if block is None or block is refused:
                    return False
            refused = None if self.demote(block) else block

    def demote_for(self, owner: Handle) -> None:
        """Demote a block for whoever asked for it, unless it was freed, found, replaced or promoted since."""
        asked = (owner.run, owner.number)
        with self._table.lock:
            block = self.asked.get(asked)
            wanted = block is not None and self._owns(owner, block)
        if block is not None and wanted:
            self.demote(block, owner)
        with self._table.lock:
            if self.asked.get(asked) is block:
                self.asked.pop(asked, None)

    def demote(self, block: StoredBlock, owner: Handle | None = None) -> bool:
        """Take a block out of the device pool, once a tier below holds it; whether that was done.

        It must have no reference but that of ``owner``, who still wants it to be done.
        """
        table = self._table
        with table.lock:
            table.expire()
            slot = block.device
            if slot is None or not self._may_leave(block, owner):
                return False
            self.complete(block)
            below = block.host is not None
        if not below:  # a referenced block stays in memory: a disk may lose it
            below = self._to_host(block, slot) or (owner is None and self.save(block))
        with table.lock:
            if not below or block.device != slot or not self._may_leave(block, owner):
                table.counters["demotions_refused"] += not below
                return False
            table.leave(block, DEVICE)
            return True

    def save(self, block: StoredBlock) -> bool:
        """Make sure that the disk tier holds a named block; False where it does not take it."""
        with self._table.lock:
            name, device, host = block.name, block.device, block.host
            if name is None or self.disk is None:
                return False
            if block.saved and self.disk.holds(name):
                return True
            if device is not None:
                self.complete(block)
        if host is not None:
            payload = host_bytes(self._host.row(host))
        else:
            assert device is not None
            self._staging.copy_(self._device.row(device))
            with self._table.lock:
                if block.device != device:
                    return False
            payload = host_bytes(self._staging)
        written = self.disk.write(name, payload, block.cost)
        with self._table.lock:
            block.saved = written in (Written.STORED, Written.PRESENT)
            self._table.counters["demotions_disk"] += written is Written.STORED
        return block.saved

    def _to_host(self, block: StoredBlock, slot: int) -> bool:
        target = self._host_slot()
        if target is None or not self._copy(self._device.row(slot), HOST, target):
            return False
        with self._table.lock:
            self.transit.discard((HOST, target))
            if block.device != slot:
                self._host.slots.give(target)
                return False
            block.host = target
            self._table.counters["demotions_host"] += 1
            self._table.settle(block)
            return True

    def _host_slot(self) -> int | None:
        """A slot of the host pool, made free by writing a block to disk if need be; None when none can leave."""
        table = self._table
        while True:
            with table.lock:
                slot = self._host.slots.take()
                if slot is not None:
                    self.transit.add((HOST, slot))
                    return slot
                victim = table.victim(HOST)
                if victim is None:
                    return None
                if victim.device is not None:
                    table.evict_host(victim)
                    continue
            self.save(victim)  # where the disk does not take it, it is dropped
            with table.lock:
                if victim.cached >> HOST & 1:
                    table.evict_host(victim)

    # Up.

    def load(self, name: Name) -> Run | None:
        """A run of one block in the device pool, promoted if need be; None for a miss, or without room."""
        table = self._table
        while True:
            with table.lock:
                block = table.index.get(name)
                if block is not None:
                    table.hold(block)
                    run = table.start(Held([block], []))
            if block is not None:
                if self.raise_block(block):
                    return run
                with table.lock:
                    table.drop(run)
                return None
            found = self._from_disk(name)
            with table.lock:
                if found is not None or name not in table.index:
                    return found
            # Another thread sealed it meanwhile.

    def raise_block(self, block: StoredBlock) -> bool:
        """Copy a referenced block from the host pool into the device pool, if it is not there; False without room."""
        if block.device is None:
            self.reclaim(1)
        with self._table.lock:
            if block.device is not None or block.host is None:
                return block.device is not None
            source = block.host
            target = self._device_slot()
        if target is None or not self._copy(self._host.row(source), DEVICE, target):
            return False
        with self._table.lock:
            self.transit.discard((DEVICE, target))
            if block.host != source or block.device is not None:  # freed meanwhile, or an equal block was sealed
                self._device.slots.give(target)
                return block.device is not None
            block.device = target
            self._table.counters["promotions_host"] += 1
            self._table.settle(block)
            return True

    def _from_disk(self, name: Name) -> Run | None:
        """A run of one block read from disk; None for a miss, without room, or if it is in memory by now."""
        if self.disk is None:
            return None
        self.reclaim(1)  # before the staging buffer is in use: what makes room for this block goes down through it
        cost = self.disk.read(name, host_bytes(self._staging))
        if cost is None:
            return None
        table = self._table
        with table.lock:
            target = None if name in table.index else self._device_slot()
        if target is None or not self._copy(self._staging, DEVICE, target):
            return None
        with table.lock:
            self.transit.discard((DEVICE, target))
            if name in table.index:
                self._device.slots.give(target)
                return None
            block = StoredBlock(name.namespace, target)
            block.filled, block.saved = self._device.slots.nbytes, True
            table.install(block, name, cost)
            table.counters["promotions_disk"] += 1
            return table.start(Held([block], []))

    def complete(self, block: StoredBlock) -> None:
        """Zero what was never written of a block in the device pool; the caller holds the lock of the table."""
        if block.filled < self._device.slots.nbytes and block.device is not None:
            self._device.row(block.device)[block.filled :].zero_()
            block.filled = self._device.slots.nbytes

    def _may_leave(self, block: StoredBlock, owner: Handle | None) -> bool:
        kept = block.pins or block.lease or not block.sealed
        return not kept and (block.refs == 0 or (block.refs == 1 and owner is not None and self._owns(owner, block)))

    def _owns(self, owner: Handle, block: StoredBlock) -> bool:
        held = self._table.runs.get(owner.run.serial)
        asked = self.asked.get((owner.run, owner.number)) is block
        return asked and held is not None and held.blocks[owner.number] is block

    def _device_slot(self) -> int | None:
        try:
            [slot] = self._table.take_device(1)
        except PoolFullError:
            self._table.counters["promotions_refused"] += 1
            return None
        self.transit.add((DEVICE, slot))
        return slot

    def _copy(self, source: Tensor, region: int, target: int) -> bool:
        """Copy a block to a place in transit; a place that cannot be written is quarantined."""
        pool = (self._device, self._host)[region]
        try:
            pool.row(target).copy_(source)
        except RuntimeError:  # what torch raises when an accelerator fails
            with self._table.lock:
                self.transit.discard((region, target))
                pool.slots.quarantine(target)
                self._table.counters["copy_errors"] += 1
            return False
        return True
