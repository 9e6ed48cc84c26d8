"""Rows that lie in the blocks of a segment: read side by side as a copy, written in place, copied before a write.

A segment holds its blocks as one run of the store. Where a block lies is looked up at every access, because it changes:
with the first write to a block that others may see, and when a block went down to another tier and came back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import torch
from torch import Tensor

from redknot.device import on_device
from redknot.latents.handles import ForeignHandleError, Handle, Outcome, Run, StaleHandleError
from redknot.latents.store import LatentStore


class Use(StrEnum):
    """What a block is to the request that holds it."""

    FOUND = "found"  # under its name; others may hold it too
    FILLED = "filled"  # by this request, to be found by others from now on
    COPIED = "copied"  # this request's own, made from one of the two above because it was written to
    FRESH = "fresh"  # this request's own from the start, also where others found another content under its name


_USES = {Outcome.INSTALLED: Use.FILLED, Outcome.SHARED: Use.FOUND, Outcome.COLLIDED: Use.FRESH}


class Blocks:
    """The blocks of one segment, in order. One thread at a time uses them."""

    def __init__(self, store: LatentStore, run: Run, uses: Sequence[Use], cost: Callable[[int], float]) -> None:
        """Take over a run, whose blocks that are not FRESH are sealed; ``cost`` of a block by its number."""
        self.store = store
        self.run = run
        self.handles = store.handles(run)
        self.uses = list(uses)
        self._cost = cost
        self.moves = 0  # how often a block got another place
        self._offsets: Tensor | None = None
        self._shut = {number for number, use in enumerate(uses) if use is not Use.FRESH}  # to ask before writing
        self._freed = False

    @property
    def offsets(self) -> Tensor:
        """Where each block begins in the device pool, in bytes: [blocks] int64; none once freed."""
        if self._offsets is None:
            self._offsets = torch.tensor([handle.offset for handle in self.handles], dtype=torch.int64)
        return self._offsets

    def check(self) -> None:
        """HandleError unless every block is alive and where it is taken to be."""
        if self._freed:
            raise StaleHandleError("the blocks of this segment were freed; its request has ended")
        self.store.check(self.handles)

    def own(self, numbers: Iterable[int]) -> None:
        """Make blocks this request's own before it writes to them; PoolFullError without room for a copy."""
        for number in sorted(self._shut.intersection(numbers)) if self._shut else ():
            self._reopen(number)

    def shared(self, numbers: Iterable[int]) -> int:
        """How many of the blocks ``numbers`` a write would have to copy."""
        return sum(self.uses[number] is not Use.FRESH for number in self._shut.intersection(numbers))

    def publish(self, number: int, key: bytes, cost: float | None = None) -> None:
        """Seal a block of our own under a key, for others to find; an equal block that has it is shared.

        Where other bytes have the key, the block stays ours alone. ``cost`` is of computing it again, in the unit of
        the space; by default what a block of tokens at its place takes.
        """
        handle, outcome = self.store.seal(
            self.handles[number], key=key, cost=self._cost(number) if cost is None else cost
        )
        self.uses[number] = _USES[outcome]
        self.replace(number, handle)

    def replace(self, number: int, handle: Handle) -> None:
        """Take another handle of a sealed block, which an operation of the store returned for it."""
        self.handles[number] = handle
        self._offsets = None
        self.moves += 1
        self._shut.add(number)

    def share(self, numbers: Sequence[int]) -> Run:
        """A run of some of these blocks as they are now, for somebody else to hold; a write copies them first."""
        run = self.store.share([self.handles[number] for number in numbers])
        self._shut.update(numbers)
        return run

    def adopt(self, number: int, handle: Handle) -> None:
        """Hold the block of somebody else's ``handle`` in the place of this one."""
        self.uses[number] = Use.FOUND
        self.replace(number, self.store.adopt(self.run, number, handle))

    def grow(self, namespace: str, more: int) -> list[Handle]:
        """Open ``more`` blocks behind the last, and return them; PoolFullError without room for them."""
        self.store.open(self.run, namespace, more)
        first = len(self.handles)
        opened = [self.store.handle(self.run, number) for number in range(first, first + more)]
        self.handles += opened
        self.uses += [Use.FRESH] * more
        self._offsets = None
        self.moves += 1
        return opened

    def free(self) -> None:
        """End the run; StaleHandleError when that was done before."""
        self.store.free(self.run)
        self._freed, self._offsets = True, torch.empty(0, dtype=torch.int64)
        self.moves += 1

    def _reopen(self, number: int) -> None:
        handle = self.store.writable(self.handles[number])
        if handle != self.handles[number]:
            self.uses[number] = Use.COPIED
        self.replace(number, handle)
        self._shut.discard(number)


@dataclass(frozen=True, eq=False)
class RowPool:
    """One kind of rows of one layer in the whole device pool; see ``views.row_view``."""

    rows: Tensor  # [N, width]
    row_bytes: int  # from one row to the next
    per_block: int


@dataclass(frozen=True, eq=False)
class PagedRows:
    """One kind of rows of one layer of a segment; row i of it belongs to block i // per_block."""

    pool: RowPool
    blocks: Blocks

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return self.pool.rows.shape[1]

    def __len__(self) -> int:
        """Rows that there is room for."""
        return len(self.blocks.handles) * self.pool.per_block

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Rows [n, width], copied; ``rows`` is a slice or numbers [n] int64."""
        return place([self], [self._numbers(rows)]).read([self])

    def __setitem__(self, rows: slice | Tensor, values: Tensor) -> None:
        """Write ``values`` [n, width]; a block that others may see is copied first (PoolFullError without room)."""
        place([self], [self._numbers(rows)]).write([self], values)

    def _numbers(self, rows: slice | Tensor) -> Tensor:
        return torch.arange(*rows.indices(len(self))) if isinstance(rows, slice) else rows


@dataclass(frozen=True, eq=False)
class Places:
    """Where rows of several paged fields lie among their blocks, side by side: N rows.

    Worked out once and used for every layer and kind with as many rows a block, always of the same segments. Where the
    blocks lie is looked up anew when one of them moved.
    """

    blocks: tuple[Tensor, ...]  # per field, [n] int64: the block of each row
    block: Tensor  # [N] int64, the same counted over all fields
    row: Tensor  # [N] int64, inside the block
    _kept: dict[int, tuple[list[int], Tensor]] = field(default_factory=dict)  # by row bytes: moves, rows of the pool

    @cached_property
    def touched(self) -> tuple[list[int], ...]:
        """The distinct blocks of each field."""
        return tuple(numbers.unique().tolist() for numbers in self.blocks)

    def read(self, fields: Sequence[PagedRows]) -> Tensor:
        """The rows in one copy, [N, width]."""
        return fields[0].pool.rows.index_select(0, self.at(fields))

    def write(self, fields: Sequence[PagedRows], values: Tensor) -> None:
        """Write ``values`` [N, width]; blocks that others may see are copied first (PoolFullError without room)."""
        for one, numbers in zip(fields, self.touched, strict=True):
            one.blocks.own(numbers)
        fields[0].pool.rows.index_copy_(0, self.at(fields), values)

    def at(self, fields: Sequence[PagedRows]) -> Tensor:
        """Which rows of the pool they are now, [N] int64, where the pool lies."""
        row_bytes, moves = fields[0].pool.row_bytes, [one.blocks.moves for one in fields]
        kept = self._kept.get(row_bytes)
        if kept is None or kept[0] != moves:
            offsets = torch.cat([one.blocks.offsets for one in fields])
            rows = (offsets // row_bytes)[self.block].add_(self.row)
            kept = (moves, on_device(rows, fields[0].pool.rows.device))
            self._kept[row_bytes] = kept
        return kept[1]


def place(fields: Sequence[PagedRows], rows: Sequence[Tensor]) -> Places:
    """Rows ``rows[i]`` [n] int64 of each field, one field behind the other.

    ForeignHandleError for fields of two stores, which cannot be read or written side by side.
    """
    pool, base = fields[0].pool, 0
    if any(one.pool is not pool for one in fields):
        raise ForeignHandleError("segments of two latent stores cannot be used side by side")
    blocks = tuple(numbers // pool.per_block for numbers in rows)
    counted = []
    for one, numbers in zip(fields, blocks, strict=True):
        counted.append(numbers + base)
        base += len(one.blocks.handles)
    return Places(blocks, torch.cat(counted), torch.cat(list(rows)) % pool.per_block)
