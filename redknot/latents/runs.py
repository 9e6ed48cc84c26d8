"""Who holds which blocks: runs, each one reference to a list of blocks. The loops of the policy path are here.

Every method expects its caller to hold the lock of the table, once for a whole run. Counters are added to once a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat

from redknot.latents.blocks import IN_DEVICE, BlockTable, StoredBlock
from redknot.latents.content import Name
from redknot.latents.handles import (
    DEVICE,
    HOST,
    BlockStateError,
    Handle,
    Match,
    MovedHandleError,
    Run,
    Serials,
    StaleHandleError,
    describe,
)
from redknot.latents.policy import Eviction
from redknot.latents.slots import Slots


class Held:
    """What a run holds: its blocks, None where there is none yet, and the numbers of those."""

    __slots__ = ("blocks", "holes")

    def __init__(self, blocks: list[StoredBlock | None], holes: list[int]) -> None:
        self.blocks = blocks
        self.holes = holes


class RunTable(BlockTable):
    """The blocks of one store and the runs that hold them."""

    def __init__(
        self,
        device: Slots,
        host: Slots,
        eviction: Callable[[], Eviction[StoredBlock]],
        clock: Callable[[], float],
        held_below: Callable[[Name], bool],
    ) -> None:
        super().__init__(device, host, eviction, clock, held_below)
        self.runs: dict[int, Held] = {}  # by serial
        self.serials = Serials()
        self._nbytes = device.nbytes

    # Runs.

    def start(self, held: Held) -> Run:
        """A run of blocks whose references it takes over."""
        run = Run(self.serials.next())
        self.runs[run.serial] = held
        return run

    def held(self, run: Run) -> Held:
        """What a run holds that is alive; HandleError for any other."""
        found = self.runs.get(run.serial)
        if found is None:
            raise self.serials.dead(run)
        return found

    def match(self, names: Sequence[Name]) -> Match:
        """A run of the blocks under some names that are in the device pool."""
        tell = self.policies[DEVICE].discard
        blocks = list(map(self.index.get, names))
        holes = []
        for number, block in enumerate(blocks):
            if block is None or block.device is None:
                holes.append(number)
                blocks[number] = None
            elif block.refs:
                block.refs += 1
            elif block.cached == IN_DEVICE:  # as ``hold`` does it
                block.refs = 1
                block.cached = 0
                tell(block)
            else:
                self.hold(block)
        return Match(self.start(Held(blocks, holes)), holes.copy())

    def open(self, held: Held, namespace: str, more: int) -> int:
        """Open blocks where a run has none, and ``more`` behind; how many, or PoolFullError, which changes nothing."""
        blocks, holes = held.blocks, held.holes
        count = len(holes) + more
        opened = list(map(StoredBlock, repeat(namespace), self.take_device(count)))
        first = holes[0] if holes else len(blocks)
        if len(blocks) - first == len(holes):  # all from there on, as behind a prefix that is known
            blocks[first:] = opened
        else:
            for number, block in zip(holes, opened, strict=False):
                blocks[number] = block
            blocks += opened[len(holes) :]
        held.holes = []
        return count

    def commit(self, held: Held, names: Sequence[Name], start: int, cost: float) -> None:
        """Seal the open ones of the blocks from ``start`` on under some names, or share the blocks that have these."""
        blocks, index = held.blocks, self.index
        installed = 0
        try:
            for number, name in enumerate(names, start):
                block = blocks[number]
                if block is None or block.sealed or block.refs > 1 or block.namespace != name.namespace:
                    if block is None or block.name is not name:
                        self._require_name(number, block, name)
                elif (other := index.setdefault(name, block)) is block:
                    block.sealed = True
                    block.cost = cost
                    block.name = name
                    installed += 1
                else:
                    self.share(held, number, other)
        finally:
            self.counters["installs"] += installed

    def fork(self, held: Held, count: int) -> Run:
        """Another run of the first ``count`` blocks."""
        if held.holes and held.holes[0] < count:
            raise BlockStateError("a run that is forked has a block that is not there yet")
        forked = held.blocks[:count]
        for block in forked:
            if block is not None:
                block.refs += 1  # it has one already, so that no policy knows it
        return self.start(Held(forked, []))

    def gather(self, blocks: Sequence[StoredBlock]) -> Run:
        """Another run of blocks that have references."""
        for block in blocks:
            block.refs += 1  # it has one already, so that no policy knows it
        return self.start(Held(list(blocks), []))

    def drop(self, run: Run) -> int:
        """End a run, its last block first; how many references that were."""
        held = self.runs.pop(run.serial, None)
        if held is None:
            raise self.serials.dead(run)
        add = self.policies[DEVICE].add
        for block in reversed(held.blocks):
            if block is None:
                continue
            if block.refs > 1:
                block.refs -= 1
            elif block.name is None or block.host is not None or block.pins or block.lease:
                self.release(block)
            else:  # as ``release`` does it
                block.refs = 0
                block.cached = IN_DEVICE
                add(block, block.cost)
        return len(held.blocks) - len(held.holes)

    # Single blocks of a run.

    def handle(self, run: Run, number: int) -> Handle:
        """Where a block of a run is now; BlockStateError where it has none."""
        block = self._block(run, number)
        if block.device is not None:
            return Handle(DEVICE, block.device * self._nbytes, self._nbytes, run, number)
        assert block.host is not None  # a block with a reference has a place
        return Handle(HOST, block.host * self._nbytes, self._nbytes, run, number)

    def of(self, handle: Handle) -> StoredBlock:
        """The block of a handle whose run is alive, wherever it is; HandleError for any other."""
        return self._block(handle.run, handle.number)

    def at(self, handle: Handle) -> StoredBlock:
        """The block of a handle whose run is alive, if it is where the handle says; HandleError for any other."""
        block = self.of(handle)
        slot = (block.device, block.host)[handle.region] if handle.region in (DEVICE, HOST) else None
        if slot is None or handle[1:3] != (slot * self._nbytes, self._nbytes):
            place = "the host pool" if block.device is None else "another place of the device pool"
            raise MovedHandleError(f"{describe(handle)} is in {place} by now; ask for its handle, or promote it")
        return block

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
            block.filled = old.filled
            self.held(handle.run).blocks[handle.number] = block
            old.device, old.refs = None, 0
            if old.host is not None:
                self.leave(old, HOST)

    def share(self, held: Held, number: int, other: StoredBlock) -> None:
        """Let a run hold an equal block instead of its own open one.

        Where the equal block is not in the device pool, it takes over the place of the open one.
        """
        block = held.blocks[number]
        assert block is not None  # the caller saw it
        self.hold(other)
        if other.device is None:
            other.device, block.device, other.filled = block.device, None, block.filled
        held.blocks[number] = other
        self.release(block)
        self.counters["shares"] += 1

    def put(self, held: Held, number: int, block: StoredBlock) -> None:
        """Let a run hold another block instead of the one it has, and take over its reference."""
        before, held.blocks[number] = held.blocks[number], block
        if before is None:
            held.holes.remove(number)
        else:
            self.release(before)

    def _block(self, run: Run, number: int) -> StoredBlock:
        blocks = self.held(run).blocks
        if not 0 <= number < len(blocks):
            raise StaleHandleError(f"{describe(run)} has {len(blocks)} blocks, and none with the number {number}")
        block = blocks[number]
        if block is None:
            raise BlockStateError(f"block {number} of {describe(run)} is not there yet; open() gives one to write")
        return block

    def _require_name(self, number: int, block: StoredBlock | None, name: Name) -> None:
        """BlockStateError unless a block that cannot be committed has the name already."""
        if block is None:
            raise BlockStateError(f"block {number} of the run is not there yet; open() gives one to write")
        if block.sealed and (block.name is name or block.name == name):
            return
        if block.sealed:
            raise BlockStateError(f"block {number} of the run is sealed under another name, or none")
        if block.refs > 1:
            raise BlockStateError(f"block {number} of the run has {block.refs} references and is not sealed")
        raise BlockStateError(f"block {number} of the run is of namespace {block.namespace!r}, its name is not")
