"""The policy path of the latent store: runs and names. No payload moves and no tensor is touched.

Every call takes the lock once and looks once whether its run is alive, however many blocks the run has.
"""

from __future__ import annotations

from collections.abc import Sequence

from redknot.latents.blocks import StoredBlock
from redknot.latents.content import Name
from redknot.latents.handles import BlockStateError, Handle, Match, Run
from redknot.latents.runs import Held, RunTable
from redknot.latents.tiers import Tiers


class References:
    """What can be done with blocks without their bytes; safe to use from threads."""

    def __init__(self, table: RunTable, tiers: Tiers) -> None:
        self._table = table
        self._tiers = tiers

    # Runs.

    def match(self, names: Sequence[Name]) -> Match:
        """A run of the blocks under ``names`` that are in the device pool; ``open`` fills it up where one is not."""
        table = self._table
        with table.lock:
            found = table.match(names)
            misses = len(found.missing)
            table.counters["hits"] += len(names) - misses
            table.counters["misses"] += misses
        return found

    def allocate(self, namespace: str, count: int = 1) -> Run:
        """A run of open blocks, their bytes undefined.

        PoolFullError when there are not so many that are not in use, pinned or leased; none is taken then. StoreError
        once the store is closed.
        """
        held = Held([], [])
        table = self._table
        with table.lock:
            self._open(held, namespace, count)
            return table.start(held)

    def open(self, run: Run, namespace: str, more: int = 0) -> None:
        """Give a run an open block wherever it has none, and ``more`` behind its last; errors as of ``allocate``."""
        table = self._table
        with table.lock:
            self._open(table.held(run), namespace, more)

    def commit(self, run: Run, names: Sequence[Name], start: int = 0, cost: float = 1.0) -> None:
        """Seal blocks of a run, from number ``start`` on, under the caller's word that they hold what ``names`` say.

        Their bytes are not looked at. Where another block has the name, the run shares it from now on. What is sealed
        under its name already stays as it is. BlockStateError for a block that is open and shared, not there, or sealed
        under another name; those before it are committed then.
        """
        table = self._table
        with table.lock:
            held = table.held(run)
            if start < 0 or start + len(names) > len(held.blocks):
                raise BlockStateError(f"blocks {start} to {start + len(names)} of a run of {len(held.blocks)}")
            table.commit(held, names, start, cost)

    def fork(self, run: Run, count: int | None = None) -> Run:
        """Another run of the first ``count`` blocks, by default all; to write to one takes ``writable`` from now on."""
        table = self._table
        with table.lock:
            held = table.held(run)
            size = len(held.blocks) if count is None else count
            if not 0 <= size <= len(held.blocks):
                raise BlockStateError(f"{count} blocks of a run of {len(held.blocks)}")
            forked = table.fork(held, size)
            table.counters["forks"] += size
        return forked

    def share(self, handles: Sequence[Handle]) -> Run:
        """Another run of blocks that runs hold, in this order; to write to one takes ``writable`` from now on.

        HandleError for a handle that may not be used as it was; nothing changes then.
        """
        table = self._table
        with table.lock:
            run = table.gather([table.at(handle) for handle in handles])
            table.counters["forks"] += len(handles)
        return run

    def adopt(self, run: Run, number: int, handle: Handle) -> Handle:
        """Let a run hold the block of another run in the place of its block ``number``; where that is.

        HandleError for a handle that may not be used as it was; nothing changes then.
        """
        table = self._table
        with table.lock:
            block = table.at(handle)
            table.handle(run, number)  # there is such a block
            block.refs += 1  # it has one already, so that no policy knows it
            table.put(table.held(run), number, block)
            table.counters["forks"] += 1
            return table.handle(run, number)

    def free(self, run: Run) -> None:
        """End a run, wherever its blocks are; HandleError when that was done before."""
        table = self._table
        with table.lock:
            table.counters["frees"] += table.drop(run)

    # Places.

    def handle(self, run: Run, number: int = 0) -> Handle:
        """Where a block of a run is; BlockStateError where it has none."""
        with self._table.lock:
            return self._table.handle(run, number)

    def handles(self, run: Run) -> list[Handle]:
        """Where the blocks of a run are; BlockStateError where it has none."""
        table = self._table
        with table.lock:
            return [table.handle(run, number) for number in range(len(table.held(run).blocks))]

    def check(self, handles: Sequence[Handle]) -> None:
        """HandleError unless every run is alive and every block where its handle says."""
        table = self._table
        with table.lock:
            for handle in handles:
                table.at(handle)

    def room(self) -> int:
        """How many blocks could be opened now: free places of the device pool, and those that a block may leave."""
        with self._table.lock:
            return self._table.room()

    # Names.

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

    def _open(self, held: Held, namespace: str, more: int) -> None:
        """The caller holds the lock."""
        if more < 0:
            raise BlockStateError(f"{more} blocks cannot be opened")
        self._tiers.keep_free(len(held.holes) + more)
        self._table.counters["allocations"] += self._table.open(held, namespace, more)

    def _resident(self, name: Name) -> StoredBlock | None:
        self._table.expire()
        block = self._table.index.get(name)
        return None if block is None or block.device is None else block
