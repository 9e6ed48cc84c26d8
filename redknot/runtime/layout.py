"""Where a set of rows reads and writes: built once per set of rows, used by every layer that runs the set.

All of it is arithmetic over positions. Rows come sorted by (session, position), any subset of positions. The
layout splits them into *runs* (consecutive rows of one segment: what is written), *blocks* (rows whose queries are
in cache together: what is attended) and, per compression ratio, the groups whose entries these rows complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from redknot.latents.segment import Segment
from redknot.latents.session import Session
from redknot.model.geometry import Geometry

BLOCK_ROWS = 512
SMALL_TILE = 8
NEG_INF = float("-inf")


@dataclass(frozen=True)
class Run:
    """Consecutive rows of one segment."""

    segment: Segment
    rows: slice  # of the row set
    lo: int  # row of the segment's tensors (counted from its start) of the first one
    first: int  # request position of the first one


@dataclass(frozen=True)
class WindowPart:
    """Rows of a block against the raw latents of one segment each, n groups of m rows and k keys."""

    rows: Tensor  # [n * m] rows of the block; a repeated row is padding
    take: Tensor | None  # [t] which of the n * m outputs to keep, None for all
    keys: tuple[tuple[Segment, Tensor], ...]  # per segment: rows of its window tensor, [n_s, k] in group order
    mask: Tensor  # [n, m, k] additive
    offsets: Tensor  # [n * m] offset of the segment whose frame the queries must be in
    groups: tuple[int, int]  # (n, m)
    own: bool  # the rows' own segment: such parts cover each row of a block exactly once
    pairs: int  # (row, key) pairs that are visible, padding not counted


@dataclass(frozen=True)
class EntryPart:
    """The rows of a block from ``row`` on, against the first ``count`` entries of one segment."""

    segment: Segment
    row: int
    count: int
    visible: Tensor  # [t] visible entries per row
    mask: Tensor | None  # [t, count] additive, None when all rows see all


@dataclass
class Block:
    """Up to BLOCK_ROWS rows of one session."""

    rows: slice  # of the row set
    positions: Tensor  # [t] request positions
    windows: list[WindowPart]
    entries: dict[int, list[EntryPart]]  # by ratio
    cache: dict[object, object] = field(default_factory=dict)  # rotations, per frame and rotary kind

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.positions)


@dataclass(frozen=True)
class GroupPlan:
    """Groups completed by a row set, as indices into (kept tail rows, then the set's rows); -1 is an empty slot."""

    own: Tensor  # [g, ratio]
    before: Tensor  # [g, ratio], the group before, for CSA's overlap
    positions: Tensor  # [g] frame position of each group's first row
    targets: tuple[tuple[Segment, slice, Tensor], ...]  # segment, groups, entry rows


@dataclass(frozen=True)
class RowSet:
    """Rows of some sessions, sorted by session and position."""

    geometry: Geometry
    sessions: tuple[Session, ...]
    positions: tuple[Tensor, ...]  # per session, [T_s] int64 ascending
    cache: dict[object, object] = field(default_factory=dict)  # rotations and group plans, shared by layers

    @cached_property
    def size(self) -> int:
        """Number of rows T."""
        return sum(len(positions) for positions in self.positions)

    @cached_property
    def runs(self) -> list[Run]:
        """What the rows write."""
        runs, row = [], 0
        for session, positions in zip(self.sessions, self.positions, strict=True):
            owner = session.segment_of(positions)
            breaks = ((positions[1:] - positions[:-1] != 1) | (owner[1:] != owner[:-1])).nonzero().flatten() + 1
            edges = [0, *breaks.tolist(), len(positions)]
            for lo, hi in pairwise(edges):
                if hi > lo:
                    segment = session.segments[int(owner[lo])]
                    first = int(positions[lo])
                    runs.append(Run(segment, slice(row + lo, row + hi), first - segment.first, first))
            row += len(positions)
        return runs

    @cached_property
    def frame_positions(self) -> Tensor:
        """Position of each row in its own segment's frame, [T]."""
        parts = []
        for session, positions in zip(self.sessions, self.positions, strict=True):
            offsets = torch.tensor([segment.offset for segment in session.segments])
            parts.append(positions - offsets[session.segment_of(positions)])
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    @cached_property
    def blocks(self) -> list[Block]:
        """What the rows read."""
        blocks, row = [], 0
        ratios = sorted({self.geometry.ratio(layer) for layer in range(self.geometry.num_layers)} - {0})
        for session, positions in zip(self.sessions, self.positions, strict=True):
            for lo in range(0, len(positions), BLOCK_ROWS):
                part = positions[lo : lo + BLOCK_ROWS]
                windows = window_parts(session, part, self.geometry.window)
                entries = {ratio: entry_parts(session, part, ratio) for ratio in ratios}
                blocks.append(Block(slice(row + lo, row + lo + len(part)), part, windows, entries))
            row += len(positions)
        return blocks


def window_parts(session: Session, positions: Tensor, window: int) -> list[WindowPart]:
    """Split a block's windows by the segment they fall in: its own first, then the ones before it."""
    owner = session.segment_of(positions)
    stops = torch.tensor([segment.stop for segment in session.segments])
    parts = []
    rows = torch.arange(len(positions))
    level = 0
    while len(rows):
        of = owner[rows] - level
        if level == 0:
            parts += [
                _window_part(session, positions, of, tiles, window, own=True)
                for tiles in _tiles(rows, positions, of, window)
            ]
        else:
            groups = [rows[of == s] for s in of.unique().tolist()]
            width = max(len(group) for group in groups)
            padded = torch.stack([torch.cat((g, g[-1:].expand(width - len(g)))) for g in groups])
            lookup = torch.zeros(len(positions), dtype=torch.int64)
            lookup[rows] = of
            parts.append(_window_part(session, positions, lookup, padded, window, own=False))
        # A row needs the segment before this one when its window reaches it; a probe's segments have gaps between.
        start = positions[rows] - window + 1
        rows = rows[(of > 0) & (start < stops[of - 1])]
        level += 1
    return parts


def _tiles(rows: Tensor, positions: Tensor, of: Tensor, window: int) -> list[Tensor]:
    """Group rows whose windows overlap: tiles [n, m] of each width m in use, padded by repetition.

    A run is cut into tiles of one window, what is left of it into small tiles, so that padding stays below a half:
    a tile gathers its keys once for all its rows.
    """
    breaks = ((positions[1:] - positions[:-1] != 1) | (of[1:] != of[:-1])).nonzero().flatten() + 1
    tiles: dict[int, list[Tensor]] = {window: [], min(SMALL_TILE, window): [], 1: []}
    for lo, hi in pairwise([0, *breaks.tolist(), len(rows)]):
        while lo < hi:
            width = next((width for width in tiles if 2 * (hi - lo) >= width), 1)
            tile = rows[lo : min(lo + width, hi)]
            tiles[width].append(torch.cat((tile, tile[-1:].expand(width - len(tile)))))
            lo += len(tile)
    return [torch.stack(group) for group in tiles.values() if group]


def _window_part(
    session: Session, positions: Tensor, of: Tensor, groups: Tensor, window: int, *, own: bool
) -> WindowPart:
    """One batch of row groups [n, m]; every group reads one segment."""
    n, m = groups.shape
    owner = of[groups[:, 0]]
    at = positions[groups]  # [n, m]
    firsts = torch.tensor([segment.first for segment in session.segments])[owner]
    stops = torch.tensor([segment.stop for segment in session.segments])[owner]
    low = torch.maximum(at[:, 0] - window + 1, firsts)
    high = torch.minimum(at[:, -1] + 1, stops)
    width = int((high - low).max())
    keys = low.unsqueeze(-1) + torch.arange(width)  # [n, k] request positions
    seen = (keys.unsqueeze(1) <= at.unsqueeze(-1)) & (keys.unsqueeze(1) > at.unsqueeze(-1) - window)
    seen &= (keys < high.unsqueeze(-1)).unsqueeze(1)
    clamped = torch.minimum(keys, high.unsqueeze(-1) - 1) - firsts.unsqueeze(-1)
    spans, start = [], 0
    for index, count in zip(*(v.tolist() for v in owner.unique_consecutive(return_counts=True)), strict=True):
        spans.append((session.segments[index], clamped[start : start + count]))
        start += count
    flat = groups.flatten()
    keep = torch.cat((flat.new_ones(1, dtype=torch.bool), flat[1:] != flat[:-1]))
    offsets = torch.tensor([segment.offset for segment in session.segments])[owner].repeat_interleave(m)
    return WindowPart(
        rows=flat,
        take=None if bool(keep.all()) else keep.nonzero().flatten(),
        keys=tuple(spans),
        mask=torch.zeros(n, m, width).masked_fill_(~seen, NEG_INF),
        offsets=offsets,
        groups=(n, m),
        own=own,
        pairs=int(seen.flatten(0, 1)[keep].sum()),
    )


def entry_parts(session: Session, positions: Tensor, ratio: int) -> list[EntryPart]:
    """The entries a block's rows may see, segment by segment."""
    parts = []
    for segment in session.segments:
        if segment.first > int(positions[-1]):
            break
        visible = segment.visible(positions, ratio)
        count = int(visible[-1])
        if not count:
            continue
        row = int((visible == 0).sum())  # visibility never decreases along a request
        visible = visible[row:]
        mask = None
        if int(visible[0]) < count:
            hidden = torch.arange(count) >= visible.unsqueeze(-1)
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, NEG_INF)
        parts.append(EntryPart(segment, row, count, visible, mask))
    return parts


def group_plan(rows: RowSet, ratio: int, overlap: bool, tails: list[Tensor]) -> GroupPlan:
    """The groups whose last missing row is in ``rows``.

    ``tails`` are the request positions [t_s] of the raw rows kept per session. A group is refreshed only from rows
    that ran: all its rows, and with ``overlap`` the group before it too, unless it opens its segment; then the
    overlap is what the segment before left open or whole, if its last row ran in this request, else none.
    """
    own, before, positions, targets = [], [], [], []
    base, row, done = 0, sum(len(tail) for tail in tails), 0
    for session, tail, fresh in zip(rows.sessions, tails, rows.positions, strict=True):
        index = _position_index(session, tail, fresh, base, row)
        for number, segment in enumerate(session.segments):
            if not len(fresh) or segment.stop <= int(fresh[0]) or segment.first > int(fresh[-1]):
                continue
            groups = _segment_groups(segment, fresh, ratio)
            if not len(groups):
                continue
            slots = segment.first + groups.unsqueeze(-1) * ratio + torch.arange(ratio)
            mine = torch.where(slots < segment.stop, index[slots.clamp(max=len(index) - 1)], -1)
            # Slots behind a closed segment's end are empty by design; any other missing row forbids the refresh.
            whole = ((mine >= 0) | (slots >= segment.stop)).all(-1)
            previous = _overlap(session, number, groups, slots, index, ratio) if overlap else mine[:, :0]
            if overlap:
                whole &= (previous >= 0).all(-1) | (groups == 0)
            own.append(mine[whole])
            before.append(previous[whole])
            kept = groups[whole]
            positions.append(segment.start + kept * ratio)
            targets.append((segment, slice(done, done + len(kept)), kept))
            done += len(kept)
        base += len(tail)
        row += len(fresh)
    if not own:
        empty = torch.empty(0, ratio, dtype=torch.int64)
        return GroupPlan(empty, empty, empty[:, 0], ())
    return GroupPlan(torch.cat(own), torch.cat(before), torch.cat(positions), tuple(targets))


def _position_index(session: Session, tail: Tensor, fresh: Tensor, base: int, row: int) -> Tensor:
    """Request position -> row of (all tails, all rows), -1 where the row did not run."""
    index = torch.full((session.length,), -1, dtype=torch.int64)
    index[tail] = base + torch.arange(len(tail))
    index[fresh] = row + torch.arange(len(fresh))
    return index


def _segment_groups(segment: Segment, fresh: Tensor, ratio: int) -> Tensor:
    """Groups of a segment that contain a fresh row and may have an entry, ascending."""
    mine = fresh[(fresh >= segment.first) & (fresh < segment.stop)]
    groups: Tensor = ((mine - segment.first) // ratio).unique_consecutive()
    return groups[groups < segment.entries(ratio)]


def _overlap(session: Session, number: int, groups: Tensor, slots: Tensor, index: Tensor, ratio: int) -> Tensor:
    """Rows [g, ratio] of the group before each group; for a segment's first one, of the segment before."""
    previous: Tensor = index[(slots - ratio).clamp(min=0, max=len(index) - 1)]
    opens = groups == 0
    if bool(opens.any()):
        carried = torch.full((ratio,), -1, dtype=torch.int64)
        if number:
            last = session.segments[number - 1]
            start = last.first + (last.length - 1) // ratio * ratio
            rows = index[start : last.stop]
            # All rows of the group or none: a pool over some of them would be neither fresh nor stored.
            if last.length and bool((rows >= 0).all()):
                carried[: len(rows)] = rows
        previous = torch.where(opens.unsqueeze(-1), carried, previous)
    return previous
