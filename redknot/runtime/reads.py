"""What a block of rows reads: its windows and the compressed entries it may see, over all segments at once.

Latents stay where they are, in their segments' frames. A :class:`Table` names rows of several segments side by side and
how far each lies from its place in the request; whoever reads it turns the rotary channels of what it read. Kernels
read each segment for itself, by the numbers of its rows (:class:`Near`, ``Entries.by_part``), and turn queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from redknot.latents.segment import Segment
from redknot.latents.session import Session

# Rows whose windows are read together: a tile of 4 reads 35 keys, one of 32 reads 63 (docs/performance.md).
TILE_ROWS = 4
NEG_INF = float("-inf")


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of several segments' latents, side by side."""

    parts: tuple[tuple[Segment, slice | Tensor], ...]  # rows of the segment's tensors
    shifts: Tensor | None  # [N] offset of each row's segment; None when all are 0, as in a recomputed request


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of a block's t rows as n tiles of m rows, each tile over its own k keys."""

    table: Table
    keys: Tensor  # [n * k] rows of the table, tile by tile; a hidden one repeats a visible one
    mask: Tensor  # [n, m, k] additive
    rows: Tensor | None  # [n * m] rows of the block, a repeated one is padding; None when they are 0, 1, ..., t - 1
    take: Tensor | None  # [t] which of the n * m outputs are the block's rows; None as above
    pairs: int  # visible (row, key) pairs


@dataclass(frozen=True, eq=False)
class NearPart:
    """The window rows of one segment that rows of a block see."""

    segment: Segment
    rows: Tensor | None  # [r] rows of the block that see any of them; None: all
    keys: Tensor  # [r, window] rows of the segment's window latents, -1 where there is none


@dataclass(frozen=True, eq=False)
class Near:
    """The windows of a block's rows, segment by segment."""

    parts: tuple[NearPart, ...]
    pairs: int  # (row, key) pairs


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries of one ratio that a block's rows may see, segment by segment: N columns."""

    table: Table
    parts: tuple[tuple[Segment, int], ...]  # segment, number of its entries
    by_part: Tensor  # [P, t] visible entries per part and row: the first so many

    @property
    def count(self) -> int:
        """Columns N."""
        return sum(count for _, count in self.parts)

    @cached_property
    def visible(self) -> Tensor:
        """Visible entries per row, [t]."""
        return self.by_part.sum(0)

    @cached_property
    def mask(self) -> Tensor | None:
        """Additive, [t, N]; None when every row sees every entry."""
        hidden = [
            torch.arange(count) >= seen.unsqueeze(-1) for (_, count), seen in zip(self.parts, self.by_part, strict=True)
        ]
        unseen = torch.cat(hidden, dim=1)
        return _additive(unseen) if bool(unseen.any()) else None


def windows(session: Session, positions: Tensor, window: int) -> Windows:
    """Lay out the windows of rows at request ``positions`` [t], ascending.

    A row sees the ``window`` request positions up to its own, whichever segments they lie in; positions that no segment
    covers (a probe's) are hidden.
    """
    owner = session.segment_of(positions)
    firsts = torch.tensor([segment.first for segment in session.segments])
    # Tiles start at multiples of their size in the segment, wherever the forward was cut.
    tile = owner * session.length + (positions - firsts[owner]) // TILE_ROWS
    _, counts = tile.unique_consecutive(return_counts=True)
    width = int(counts.max())
    ends = counts.cumsum(0)
    starts = ends - counts
    rows = torch.minimum(starts.unsqueeze(-1) + torch.arange(width), ends.unsqueeze(-1) - 1)
    at = positions[rows]  # [n, m]
    low = at[:, 0] - window + 1
    keys = low.unsqueeze(-1) + torch.arange(int((at[:, -1] - low).max()) + 1)  # [n, k] request positions
    seen = (keys.unsqueeze(1) <= at.unsqueeze(-1)) & (keys.unsqueeze(1) > at.unsqueeze(-1) - window)
    seen &= _covered(session, keys).unsqueeze(1)
    read = keys[seen.any(1)].unique()
    full = len(rows) * width == len(positions)
    padding = torch.arange(width) >= counts.unsqueeze(-1)
    return Windows(
        table=_window_table(session, read),
        keys=torch.searchsorted(read, keys.flatten()).clamp(max=len(read) - 1),
        mask=_additive(~seen),
        rows=None if full else rows.flatten(),
        take=None if full else (~padding).flatten().nonzero().flatten(),
        pairs=int((seen & ~padding.unsqueeze(-1)).sum()),
    )


def near(session: Session, positions: Tensor, window: int) -> Near:
    """The same windows for whoever reads them in place: rows as of :func:`windows`."""
    keys = positions.unsqueeze(-1) + torch.arange(1 - window, 1)  # [t, window] request positions
    owner = torch.where(_covered(session, keys), session.segment_of(keys), -1)
    parts = []
    for number in range(int(owner.max()) + 1):
        mine, segment = owner == number, session.segments[number]
        rows = mine.any(1).nonzero().flatten()
        if len(rows):
            of_segment = torch.where(mine, keys - segment.first, -1)
            every = len(rows) == len(positions)
            parts.append(NearPart(segment, None if every else rows, of_segment if every else of_segment[rows]))
    return Near(tuple(parts), int((owner >= 0).sum()))


def _covered(session: Session, positions: Tensor) -> Tensor:
    """Whether a segment holds each position."""
    stops = torch.tensor([segment.stop for segment in session.segments])
    owner = session.segment_of(positions)
    return (owner >= 0) & (positions < stops[owner.clamp(min=0)])


def _window_table(session: Session, positions: Tensor) -> Table:
    """Window rows at request ``positions`` [N], ascending."""
    owner = session.segment_of(positions)
    numbers, counts = owner.unique_consecutive(return_counts=True)
    parts: list[tuple[Segment, slice | Tensor]] = []
    for number, mine in zip(numbers.tolist(), positions.split(counts.tolist()), strict=True):
        segment = session.segments[number]
        parts.append((segment, as_slice(mine - segment.first)))
    return Table(tuple(parts), _shifts([segment for segment, _ in parts], counts))


def as_slice(rows: Tensor) -> slice | Tensor:
    """Ascending row numbers [n], n >= 1, as a slice where they are consecutive: a view is read without a copy."""
    lo, hi = int(rows[0]), int(rows[-1]) + 1
    return slice(lo, hi) if hi - lo == len(rows) else rows


def entries(session: Session, positions: Tensor, ratio: int) -> Entries | None:
    """The entries that rows at request ``positions`` [t], ascending, may see; None when they see none."""
    parts, visible = [], []
    for segment in session.segments:
        if segment.first > int(positions[-1]):
            break
        seen = segment.visible(positions, ratio)
        count = int(seen[-1])  # visibility never decreases along a request
        if count:
            parts.append((segment, count))
            visible.append(seen)
    if not parts:
        return None
    counts = torch.tensor([count for _, count in parts])
    return Entries(
        table=Table(tuple((s, slice(0, count)) for s, count in parts), _shifts([s for s, _ in parts], counts)),
        parts=tuple(parts),
        by_part=torch.stack(visible),
    )


def _shifts(segments: list[Segment], counts: Tensor) -> Tensor | None:
    offsets = torch.tensor([segment.offset for segment in segments])
    return offsets.repeat_interleave(counts) if bool(offsets.any()) else None


def _additive(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill_(hidden, NEG_INF)
