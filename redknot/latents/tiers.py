"""What callers ask of the tiers below the device pool. The moves themselves run on a worker's thread."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from redknot.errors import StoreError
from redknot.latents.content import Name
from redknot.latents.handles import BlockStateError, Handle, Match, PoolFullError, Run, describe
from redknot.latents.moves import Moves
from redknot.latents.runs import RunTable
from redknot.latents.worker import Job, Worker, deadline

_RESERVE_SHARE = 16  # this part of the device pool is kept free by demotion, so that allocations need not evict


class Tiers:
    """Requests to move blocks, in a queue of bounded length. Only ``fetch``, ``promote`` and ``flush`` wait."""

    def __init__(self, table: RunTable, moves: Moves, queue: int) -> None:
        below = table.host.capacity > 0 or moves.disk is not None
        self._reserve = max(1, table.device.capacity // _RESERVE_SHARE) if below else None
        self._table = table
        self._moves = moves
        self._worker = Worker("redknot-latents", queue)
        self._reclaiming = False

    def keep_free(self, taking: int) -> None:
        """Ask for demotions if the device pool runs low once ``taking`` blocks are taken, and others could leave.

        The caller holds the lock of the table. StoreError once the worker has ended.
        """
        if self._reserve is None or self._reclaiming:
            return
        free = self._table.device.free
        if free - taking >= self._reserve or self._table.room() <= max(free, taking):
            return
        self._reclaiming = self._worker.submit(Job(self._reclaim))
        self._table.counters["demotions_refused"] += not self._reclaiming

    def fetch(self, names: Sequence[Name], timeout_s: float) -> Match:
        """See ``LatentStore``."""
        left = deadline(timeout_s)
        table, disk = self._table, self._moves.disk is not None
        with table.lock:
            found = table.match(names)
            table.counters["hits"] += len(names) - len(found.missing)
            below = [number for number in found.missing if disk or names[number] in table.index]
        jobs: list[tuple[int, Job[Run | None]]] = []
        try:
            for number in below:
                job = Job(partial(self._moves.load, names[number]), self._undo)
                if self._worker.submit(job, urgent=True, timeout_s=left()):
                    jobs.append((number, job))
        except StoreError:  # the worker has ended, and nobody gets a run
            for run in (found.run, *(job.wait(left()) for _, job in jobs)):
                self._undo(run)
            raise
        loaded = [(number, run) for number, job in jobs if (run := job.wait(left())) is not None]
        with table.lock:
            held = table.held(found.run)
            for number, run in loaded:
                [block] = table.runs.pop(run.serial).blocks
                assert block is not None  # what the worker loads is a run of one
                table.put(held, number, block)
            table.counters["hits_below"] += len(loaded)
            table.counters["misses"] += len(held.holes)
            return Match(found.run, held.holes.copy())

    def prefetch(self, names: Sequence[Name]) -> int:
        """See ``LatentStore``."""
        for taken, name in enumerate(names):
            if not self._worker.submit(Job(partial(self._load_unreferenced, name))):
                return taken
        return len(names)

    def demote(self, handle: Handle) -> bool:
        """See ``LatentStore``."""
        table = self._table
        with table.lock:
            table.expire()
            block = table.at(handle)
            if not block.sealed or block.refs > 1 or block.pins or block.lease:
                raise BlockStateError(f"{describe(handle)} is open, shared, pinned or leased and cannot be demoted")
            taken = self._worker.submit(Job(partial(self._moves.demote_for, handle)))
            if taken:
                self._moves.asked[handle.run, handle.number] = block
        return taken

    def promote(self, handle: Handle, timeout_s: float) -> Handle:
        """See ``LatentStore``."""
        table = self._table
        with table.lock:
            block = table.of(handle)
            there = block.device is not None
            self._moves.asked.pop((handle.run, handle.number), None)
        if not there:
            left = deadline(timeout_s)
            job = Job(partial(self._moves.raise_block, block))
            if self._worker.submit(job, urgent=True, timeout_s=left()):
                job.wait(left())
        with table.lock:
            if table.of(handle).device is None:
                raise PoolFullError(f"{describe(handle)} found no room in the device pool within {timeout_s} s")
            return table.handle(handle.run, handle.number)

    def shrink(self, blocks: int) -> bool:
        """See ``LatentStore``."""
        return self._worker.submit(Job(partial(self._shrink, blocks)))

    def flush(self, timeout_s: float) -> bool:
        """See ``LatentStore``."""
        left = deadline(timeout_s)
        with self._table.lock:
            blocks = list(self._table.index.values())
        jobs = (Job(partial(self._moves.save, block)) for block in blocks)
        return all(self._worker.submit(job, timeout_s=left()) for job in jobs) and self._worker.drain(left())

    def drain(self, timeout_s: float) -> bool:
        """See ``LatentStore``."""
        return self._worker.drain(timeout_s)

    def close(self, timeout_s: float) -> None:
        """See ``LatentStore``."""
        self._worker.close(timeout_s)

    # On the worker's thread.

    def _reclaim(self) -> None:
        """One block at a time: whoever waits for a promotion waits for one demotion, not for all."""
        with self._table.lock:
            free = self._table.device.free + 1
        moved = self._moves.reclaim(free)
        with self._table.lock:
            self._reclaiming = False
            if moved:
                with suppress(StoreError):  # the store was closed meanwhile
                    self.keep_free(0)

    def _shrink(self, blocks: int) -> None:
        with self._table.lock:
            free = self._table.device.free
        self._moves.reclaim(min(free + blocks, self._table.device.capacity))

    def _load_unreferenced(self, name: Name) -> None:
        self._undo(self._moves.load(name))

    def _undo(self, run: Run | None) -> None:
        """Free a run that nobody waits for."""
        if run is not None:
            with self._table.lock:
                self._table.drop(run)
