"""Rows that lie in the blocks of a segment: read side by side as a copy, written in place, copied before a write.

A segment holds its blocks by handles, one reference each. Where a block lies is looked up at every access, because it
changes: with the first write to a block that others may see, and when a block went down to another tier and came back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from redknot.latents.handles import ForeignHandleError, Handle, StaleHandleError
from redknot.latents.store import LatentStore


class Use(StrEnum):
    """What a block is to the request that holds it."""

    FOUND = "found"  # under its name; others may hold it too
    FILLED = "filled"  # by this request, to be found by others from now on
    COPIED = "copied"  # this request's own, made from one of the two above because it was written to
    FRESH = "fresh"  # this request's own from the start


class Blocks:
    """The blocks of one segment, in order. One thread at a time uses them."""

    def __init__(self, store: LatentStore, handles: Sequence[Handle], uses: Sequence[Use]) -> None:
        """Take over references; those that are not FRESH are sealed."""
        self.store = store
        self.handles = list(handles)
        self.uses = list(uses)
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

    def own(self, numbers: Tensor) -> None:
        """Make blocks ``numbers`` [n] int64 this request's own before it writes to them; PoolFullError without room."""
        if not self._shut:
            return
        for number in sorted(self._shut.intersection(numbers.tolist())):
            self._reopen(number)

    def shared(self, numbers: Tensor) -> int:
        """How many of the distinct blocks ``numbers`` [n] int64 a write would have to copy."""
        return len(self._shut.intersection(numbers.tolist()))

    def publish(self, number: int, key: bytes) -> None:
        """Seal a block of our own under a key, for others to find; an equal block that has it is shared."""
        handle = self.store.seal(self.handles[number], key=key)
        self.uses[number] = Use.FILLED if handle == self.handles[number] else Use.FOUND
        self.replace(number, handle)

    def replace(self, number: int, handle: Handle) -> None:
        """Take another handle of a block, which an operation of the store returned for it."""
        self.handles[number] = handle
        self._offsets = None
        self._shut.add(number)

    def free(self) -> None:
        """End every reference; StaleHandleError when that was done before."""
        for handle in self.handles:
            self.store.free(handle)
        self._freed, self._offsets = True, torch.empty(0, dtype=torch.int64)

    def _reopen(self, number: int) -> None:
        handle = self.store.writable(self.handles[number])
        if handle != self.handles[number]:
            self.uses[number] = Use.COPIED
        self.replace(number, handle)
        self._shut.discard(number)


@dataclass(frozen=True, eq=False)
class PagedRows:
    """One kind of rows of one layer of a segment; row i of it belongs to block i // per_block."""

    pool: Tensor  # [N, width] all rows of this kind in the device pool, see views.row_view
    blocks: Blocks
    per_block: int

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return self.pool.shape[1]

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next."""
        return self.pool.stride(0) * self.pool.itemsize

    def __len__(self) -> int:
        """Rows that there is room for."""
        return len(self.blocks.handles) * self.per_block

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Rows [n, width], copied; ``rows`` is a slice or numbers [n] int64."""
        numbers = self._numbers(rows)
        return self.pool.index_select(0, self._at(numbers))

    def __setitem__(self, rows: slice | Tensor, values: Tensor) -> None:
        """Write ``values`` [n, width]; a block that others may see is copied first (PoolFullError without room)."""
        numbers = self._numbers(rows)
        self.blocks.own(numbers // self.per_block)
        self.pool.index_copy_(0, self._at(numbers), values)

    def _numbers(self, rows: slice | Tensor) -> Tensor:
        return torch.arange(*rows.indices(len(self))) if isinstance(rows, slice) else rows

    def _at(self, numbers: Tensor) -> Tensor:
        firsts = self.blocks.offsets // self.row_bytes
        return firsts[numbers // self.per_block] + numbers % self.per_block


@dataclass(frozen=True, eq=False)
class FirstRows:
    """The first ``counts[i]`` rows of each of several paged fields, one behind the other: N rows.

    Made once, and used for every layer whose fields have as many rows a block.
    """

    block: Tensor  # [N] int64, counted over the blocks of all the fields
    row: Tensor  # [N] int64, inside the block

    def of(self, fields: Sequence[PagedRows]) -> Tensor:
        """Read the rows, in one copy: [N, width]."""
        first = fields[0]
        offsets = torch.cat([field.blocks.offsets for field in fields]) if len(fields) > 1 else first.blocks.offsets
        return first.pool.index_select(0, (offsets // first.row_bytes)[self.block] + self.row)


def first_rows(fields: Sequence[PagedRows], counts: Sequence[int]) -> FirstRows:
    """See ``FirstRows``; ForeignHandleError for fields of two stores, which cannot be read side by side."""
    per_block, base = fields[0].per_block, 0
    if any(field.pool is not fields[0].pool for field in fields):
        raise ForeignHandleError("segments of two latent stores cannot be read side by side")
    blocks, rows = [], []
    for field, count in zip(fields, counts, strict=True):
        numbers = torch.arange(count)
        blocks.append(numbers // per_block + base)
        rows.append(numbers % per_block)
        base += len(field.blocks.handles)
    return FirstRows(torch.cat(blocks), torch.cat(rows))
