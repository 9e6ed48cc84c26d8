"""What one request keeps of the rows it ran or restored: segments in their own frames.

A segment is a run of tokens whose latents are stored at the positions they were computed at (its canonical frame):
a known document at 0..n-1, new text at 0..m-1, or a whole prompt. ``offset`` says where position 0 of that frame
lies in the request, so nothing moves when a document appears somewhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from redknot.latents.paged import Blocks, PagedRows


class Pending(Protocol):
    """What of a segment is still to be filled, layer by layer, from where its document is stored."""

    def fill(self, layer: int) -> None:
        """Fill all layers up to this one."""

    def adopted(self, blocks: Collection[int], rows: int) -> None:
        """These blocks, and the window rows in front of this one, came from elsewhere and stay as they are."""


@dataclass(eq=False)
class LayerLatents:
    """One layer of one segment; row i is counted from the segment's start. What a layer lacks is None."""

    window: Tensor  # [rows, d] rotated latents, in the arena of the request
    entries: PagedRows | None  # d numbers each, on CSA and HCA layers
    index_keys: PagedRows | None  # index_head_dim numbers each, on CSA layers


@dataclass(eq=False)
class Segment:
    """Tokens [start, end) of a canonical frame, placed so that frame position p is request position offset + p.

    A closed segment has a partial entry over the rows of its open group; the last segment of a request stays open and
    grows. Block i of it holds its tokens from ``start`` + i blocks on: where ``start`` is a multiple of the block
    length, as in every known document, these are whole blocks of the document. A workspace gives it memory.
    """

    offset: int
    start: int
    end: int
    closed: bool
    layers: list[LayerLatents] = field(default_factory=list)
    blocks: Blocks | None = None
    pending: Pending | None = None  # None: everything is there

    @property
    def length(self) -> int:
        """Tokens present."""
        return self.end - self.start

    @property
    def first(self) -> int:
        """Request position of the first token."""
        return self.offset + self.start

    @property
    def stop(self) -> int:
        """Request position behind the last token."""
        return self.offset + self.end

    def entries(self, ratio: int) -> int:
        """Compressed entries that exist once every row is there."""
        return -(-self.length // ratio) if self.closed else self.length // ratio

    def visible(self, positions: Tensor, ratio: int) -> Tensor:
        """How many entries each request position sees: [T] int64.

        An entry is visible from its group's last token on, a partial one from the segment's last token on.
        """
        seen = (positions - self.first + 1).clamp(0, self.length)
        count = seen // ratio
        if self.closed and self.length % ratio:
            count = count + (seen == self.length).long()
        return count


def put_windows(segments: Sequence[Segment], lo: int, state: Tensor) -> None:
    """Write window rows [layers, n, d] at request positions [lo, lo + n), as far as segments hold them."""
    for segment, rows, part in _overlaps(segments, lo, lo + state.shape[1]):
        for latents, values in zip(segment.layers, state, strict=True):
            latents.window[rows] = values[part]


def get_windows(segments: Sequence[Segment], lo: int, hi: int) -> Tensor:
    """Window rows of request positions [lo, hi), all of which segments hold: [layers, n, d], copied."""
    parts = [torch.stack([held.window[rows] for held in s.layers]) for s, rows, _ in _overlaps(segments, lo, hi)]
    return torch.cat(parts, dim=1)


def _overlaps(segments: Sequence[Segment], lo: int, hi: int) -> Iterator[tuple[Segment, slice, slice]]:
    """The segments that hold some of positions [lo, hi): their rows, and which of the hi - lo these are."""
    for segment in segments:
        start, stop = max(lo, segment.first), min(hi, segment.stop)
        if start < stop:
            yield segment, slice(start - segment.first, stop - segment.first), slice(start - lo, stop - lo)
