"""Where a set of rows reads and writes: built once per set of rows, used by every layer that runs the set.

All of it is arithmetic over positions. Rows come sorted by (session, position), any subset of positions. The
layout splits them into *writes* (rows of one segment), *blocks* (rows whose queries are
in cache together: what is attended) and, per compression ratio, the groups whose entries these rows complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from redknot.latents.segment import Segment
from redknot.latents.session import Session
from redknot.model.geometry import Geometry
from redknot.runtime.reads import Entries, Near, Windows, as_slice, entries, near, windows

BLOCK_ROWS = 512


@dataclass(frozen=True)
class Write:
    """The rows of one segment."""

    segment: Segment
    rows: slice  # of the row set
    into: slice | Tensor  # rows of the segment's tensors, counted from its start


@dataclass
class Block:
    """Up to BLOCK_ROWS rows of one session."""

    rows: slice  # of the row set
    positions: Tensor  # [t] request positions
    session: Session
    window: int
    entries: dict[int, Entries | None]  # by ratio
    cache: dict[object, object] = field(default_factory=dict)  # rotations, per frame and rotary kind

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.positions)

    @cached_property
    def windows(self) -> Windows:
        """Its windows, as turned copies are read."""
        return windows(self.session, self.positions, self.window)

    @cached_property
    def near(self) -> Near:
        """Its windows, as they are read in place."""
        return near(self.session, self.positions, self.window)


@dataclass(frozen=True)
class GroupPlan:
    """Groups completed by a row set, as indices into (kept tail rows, then the set's rows); -1 is an empty slot."""

    own: Tensor  # [g, ratio]
    before: Tensor  # [g, ratio], the group before, for CSA's overlap
    positions: Tensor  # [g] frame position of each group's first row
    targets: tuple[tuple[Segment, Tensor], ...]  # segments in order of the groups, entry rows [g of the segment]
    tails: tuple[tuple[Tensor, Tensor], ...]  # per session: the last rows, for groups still open; their positions
    boundaries: tuple[tuple[tuple[int, Tensor, Tensor], ...], ...]  # per session: the same in front of a position


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
    def writes(self) -> list[Write]:
        """Where the rows leave their latents."""
        writes, row = [], 0
        for session, positions in zip(self.sessions, self.positions, strict=True):
            numbers, counts = session.segment_of(positions).unique_consecutive(return_counts=True)
            for number, mine in zip(numbers.tolist(), positions.split(counts.tolist()), strict=True):
                segment = session.segments[number]
                writes.append(Write(segment, slice(row, row + len(mine)), as_slice(mine - segment.first)))
                row += len(mine)
        return writes

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
                seen = {ratio: entries(session, part, ratio) for ratio in ratios}
                own = slice(row + lo, row + lo + len(part))
                blocks.append(Block(own, part, session, self.geometry.window, seen))
            row += len(positions)
        return blocks


def group_plan(rows: RowSet, ratio: int, overlap: bool, tails: list[Tensor]) -> GroupPlan:
    """The groups whose last missing row is in ``rows``.

    ``tails`` are the request positions [t_s] of the raw rows kept per session. A group is refreshed only from rows
    that ran: all its rows, and with ``overlap`` the group before it too, unless it opens its segment; then the
    overlap is what the segment before left open or whole, if its last row ran in this request, else none.
    """
    own, before, positions, targets, kept_rows, at_boundaries = [], [], [], [], [], []
    base, row = 0, sum(len(tail) for tail in tails)
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
            targets.append((segment, kept))
        ran, longest = torch.cat((tail, fresh)), ratio * (2 if overlap else 1)
        last = ran[-longest:]
        kept_rows.append((index[last], last))
        in_front = [(at, ran[ran < at][-longest:]) for at in session.boundaries]
        at_boundaries.append(tuple((at, index[rows], rows) for at, rows in in_front))
        base += len(tail)
        row += len(fresh)
    if not own:
        empty = torch.empty(0, ratio, dtype=torch.int64)
        return GroupPlan(empty, empty, empty[:, 0], (), tuple(kept_rows), tuple(at_boundaries))
    return GroupPlan(
        torch.cat(own),
        torch.cat(before),
        torch.cat(positions),
        tuple(targets),
        tuple(kept_rows),
        tuple(at_boundaries),
    )


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
