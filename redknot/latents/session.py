"""The state of one request between forwards: its segments and the raw compressor rows that are still open."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from redknot.latents.segment import Segment


@dataclass(eq=False)
class CompressorTail:
    """Raw (unpooled) projections of the last rows that ran in one layer, for groups that later rows complete.

    Kept are at most two groups: the open one, and the one before it, whose first series overlaps into it (CSA).
    """

    positions: Tensor  # [t] int64, request positions, ascending
    raw: tuple[Tensor, ...]  # kv [t, c * d], gate, indexer kv [t, 2 * index_head_dim] (no columns outside CSA), gate


@dataclass(eq=False)
class Session:
    """One request: consecutive segments from request position 0, the last one open while it grows."""

    segments: list[Segment]
    tails: dict[int, CompressorTail] = field(default_factory=dict)  # by layer

    @property
    def length(self) -> int:
        """Request positions covered so far."""
        return self.segments[-1].stop

    def segment_of(self, positions: Tensor) -> Tensor:
        """Index of the segment that holds each request position: [T] -> [T]."""
        firsts = torch.tensor([segment.first for segment in self.segments])
        return torch.searchsorted(firsts, positions, right=True) - 1
