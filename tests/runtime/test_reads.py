"""What blocks read, against the definitions: the last positions of a window, the entries of whole groups."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from redknot.latents.segment import Segment
from redknot.latents.session import Session
from redknot.runtime.reads import TILE_ROWS, Table, entries, near, windows
from tests.kit.sessions import sessions_and_rows


def rows_of(table: Table) -> list[tuple[Segment, int, int]]:
    """(segment, row, shift) of every row of a table; each must be a row that exists."""
    found = []
    for segment, rows in table.parts:
        picked = list(range(rows.start, rows.stop)) if isinstance(rows, slice) else rows.tolist()
        found += [(segment, row) for row in picked]
    shifts = [0] * len(found) if table.shifts is None else table.shifts.tolist()
    return [(segment, row, shift) for (segment, row), shift in zip(found, shifts, strict=True)]


def seen_pairs(session: Session, positions: list[int], window: int) -> tuple[list[tuple[int, int]], int]:
    """(query, key) request positions of every visible pair as laid out, and the pairs that are counted."""
    layout = windows(session, torch.tensor(positions), window)
    table = []
    for segment, row, shift in rows_of(layout.table):
        assert 0 <= row < segment.length
        assert shift == segment.offset
        table.append(segment.first + row)
    n, m, k = layout.mask.shape
    assert m <= TILE_ROWS
    rows = list(range(n * m)) if layout.rows is None else layout.rows.tolist()
    take = list(range(len(positions))) if layout.take is None else layout.take.tolist()
    assert [rows[flat] for flat in take] == list(range(len(positions)))
    keys, mask = layout.keys.view(n, k).tolist(), layout.mask.tolist()
    pairs = []
    for flat in take:
        for key, bias in zip(keys[flat // m], mask[flat // m][flat % m], strict=True):
            assert 0 <= key < len(table)  # also what is hidden must be a row that was read
            if bias == 0:
                pairs.append((positions[rows[flat]], table[key]))
    return pairs, layout.pairs


@given(sessions_and_rows(), st.sampled_from([1, 2, 8, 32]))
def test_every_row_sees_its_window_once(case: tuple[Session, list[int]], window: int) -> None:
    session, positions = case
    found, counted = seen_pairs(session, positions, window)
    expected = [(p, key) for p in positions for key in range(max(p - window + 1, 0), p + 1)]
    assert sorted(found) == expected
    assert counted == len(expected)


@given(sessions_and_rows(), st.sampled_from([1, 2, 8, 32]))
def test_only_rows_that_somebody_sees_are_read(case: tuple[Session, list[int]], window: int) -> None:
    """The others may hold anything, and memory that was never written spoils a product even where it is hidden."""
    session, positions = case
    layout = windows(session, torch.tensor(positions), window)
    read = [segment.first + row for segment, row, _ in rows_of(layout.table)]
    assert read == sorted({key for p in positions for key in range(max(p - window + 1, 0), p + 1)})


def near_pairs(session: Session, positions: list[int], window: int) -> tuple[list[tuple[int, int]], int]:
    """(row position, key position) pairs of the windows as they are read in place, and how many were counted."""
    layout, pairs = near(session, torch.tensor(positions), window), []
    for part in layout.parts:
        rows = range(len(positions)) if part.rows is None else part.rows.tolist()
        assert part.keys.shape == (len(rows), window)
        assert bool((part.keys >= 0).any(1).all())  # no row that sees nothing of the segment
        for row, keys in zip(rows, part.keys.tolist(), strict=True):
            assert all(key < part.segment.length for key in keys)
            pairs += [(positions[row], part.segment.first + key) for key in keys if key >= 0]
    return pairs, layout.pairs


@given(sessions_and_rows(), st.sampled_from([1, 2, 8, 32]))
def test_windows_in_place_are_the_same_windows(case: tuple[Session, list[int]], window: int) -> None:
    session, positions = case
    found, counted = near_pairs(session, positions, window)
    expected, expected_count = seen_pairs(session, positions, window)
    assert sorted(found) == sorted(expected)
    assert counted == expected_count


def test_positions_that_no_segment_covers_are_hidden() -> None:
    """A probe's session begins anywhere and has gaps."""
    session = Session([Segment(40, 0, 10, closed=True), Segment(60, 0, 8, closed=False)])
    found, _ = seen_pairs(session, [45, 60, 67], 32)
    covered = {*range(40, 50), *range(60, 68)}
    assert sorted(found) == [(p, key) for p in (45, 60, 67) for key in range(p - 31, p + 1) if key in covered]
    assert sorted(near_pairs(session, [45, 60, 67], 32)[0]) == sorted(found)


@given(sessions_and_rows(), st.sampled_from([4, 32]))
def test_rows_see_entries_from_their_groups_last_row_on(case: tuple[Session, list[int]], ratio: int) -> None:
    session, positions = case
    layout = entries(session, torch.tensor(positions), ratio)
    found: dict[int, dict[int, list[int]]] = {position: {} for position in positions}
    if layout is not None:
        table = rows_of(layout.table)
        assert len(table) == layout.count
        assert all(shift == segment.offset for segment, _, shift in table)
        mask = torch.zeros(len(positions), layout.count) if layout.mask is None else layout.mask
        for position, row, count in zip(positions, mask.tolist(), layout.visible.tolist(), strict=True):
            seen = [(segment, entry) for (segment, entry, _), bias in zip(table, row, strict=True) if bias == 0]
            assert len(seen) == count
            for segment, entry in seen:
                found[position].setdefault(session.segments.index(segment), []).append(entry)
    for position in positions:
        for number, segment in enumerate(session.segments):
            count = int(segment.visible(torch.tensor([position]), ratio))
            assert found[position].get(number, []) == list(range(count))
