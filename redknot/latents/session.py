"""The state of one request between forwards: its segments and the raw compressor rows that are still open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from redknot.device import CPU, on_device
from redknot.latents.segment import Segment
from redknot.latents.space import LatentSpace


class Reading(Protocol):
    """Whoever reads what a session is filled from, ahead of the layer that needs it."""

    def ready(self, layer: int) -> None:
        """Wait until everything that this layer uses is there; raises where it will not be."""


TailRows = tuple[Tensor, Tensor, Tensor, Tensor]  # kv [t, c * d], gate, indexer kv [t, 2 * index_head_dim], gate


@dataclass(frozen=True, eq=False)
class CompressorTail:
    """Raw (unpooled) projections of the last rows that ran in one layer, for groups that later rows complete.

    Kept are at most two groups: the open one, and the one before it where its first series overlaps into it (CSA).
    """

    positions: Tensor  # [t] int64, request positions, ascending
    raw: TailRows  # in the arena of the request; without columns where a layer has no indexer


@dataclass(eq=False)
class Session:
    """One request: consecutive segments from request position 0, the last one open while it grows."""

    segments: list[Segment]
    space: LatentSpace | None = None  # where its memory is from; None: segments without memory, to count positions
    tail_rows: dict[int, TailRows] = field(default_factory=dict)  # by layer: room for the longest tail
    tails: dict[int, CompressorTail] = field(default_factory=dict)  # by layer
    reading: Reading | None = None  # None: everything that it is filled from is there
    # Request positions inside the next forward, or at its end, at which the tails are wanted too, and what it left.
    boundaries: tuple[int, ...] = ()
    boundary_tails: dict[int, dict[int, CompressorTail]] = field(default_factory=dict)  # by position and layer

    @property
    def length(self) -> int:
        """Request positions covered so far."""
        return self.segments[-1].stop

    @property
    def device(self) -> torch.device:
        """Where its latents lie."""
        return CPU if self.space is None else self.space.device

    def segment_of(self, positions: Tensor) -> Tensor:
        """Index of the segment that holds each request position: [T] -> [T]."""
        firsts = torch.tensor([segment.first for segment in self.segments])
        return torch.searchsorted(firsts, positions, right=True) - 1

    def memory_space(self) -> LatentSpace:
        """Where the memory of a session that has some is from."""
        assert self.space is not None
        return self.space

    def check(self) -> None:
        """HandleError unless every block is this request's to read and in the device pool."""
        for segment in self.segments:
            if segment.blocks is not None:
                segment.blocks.check()

    def require(self, layer: int) -> None:
        """Have every segment filled up to this layer; raises what the reading does."""
        if self.reading is not None:
            self.reading.ready(layer)
        for segment in self.segments:
            if segment.pending is not None:
                segment.pending.fill(layer)

    def mark_pages(self, lo: int, hi: int) -> None:
        """Ask the next forward for the tails at the ends of the pages that rows [lo, hi) complete."""
        size = self.memory_space().geometry.block_length
        self.boundaries = tuple(range((lo // size + 1) * size, hi + 1, size))

    def keep_tail(self, layer: int, positions: Tensor, raw: Sequence[Tensor], index: Tensor) -> None:
        """Replace a layer's tail by rows ``index`` [t] of ``raw`` (as ``TailRows``), at request ``positions`` [t]."""
        room, index = self.tail_rows[layer], on_device(index, self.device)
        kept = tuple(into[: len(index)] for into in room)
        for into, rows in zip(kept, raw, strict=True):
            torch.index_select(rows, 0, index, out=into)
        self.tails[layer] = CompressorTail(positions, (kept[0], kept[1], kept[2], kept[3]))

    def keep_boundary(self, layer: int, at: int, positions: Tensor, raw: Sequence[Tensor], index: Tensor) -> None:
        """Copy a layer's tail as it is in front of position ``at``; the rest as of ``keep_tail``."""
        index = on_device(index, self.device)
        kept = [rows[index] for rows in raw]
        tail = CompressorTail(positions, (kept[0], kept[1], kept[2], kept[3]))
        self.boundary_tails.setdefault(at, {})[layer] = tail
