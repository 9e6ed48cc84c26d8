"""The layout against the definitions it is arithmetic for: who writes where, who sees what, which groups are whole."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from redknot.latents.segment import Segment
from redknot.latents.session import Session
from redknot.runtime.layout import BLOCK_ROWS, RowSet, WindowPart, entry_parts, group_plan, window_parts
from tests.kit.oracle import Oracle

BLOCK = 32


def session_of(lengths: list[int], blocks: list[int]) -> Session:
    segments, at = [], 0
    for number, length in enumerate(lengths):
        start = BLOCK * blocks[number % len(blocks)]
        segments.append(Segment(at - start, start, start + length, closed=number < len(lengths) - 1))
        at += length
    return Session(segments)


sessions = st.builds(
    session_of,
    st.lists(st.one_of(st.integers(1, 9), st.sampled_from([31, 32, 33, 64, 70])), min_size=1, max_size=5),
    st.lists(st.integers(0, 2), min_size=1, max_size=3),
)


@st.composite
def sessions_and_rows(draw: st.DrawFn, most: int = 160) -> tuple[Session, list[int]]:
    """A session and an ascending subset of its positions: scattered ones, runs, or all."""
    session = draw(sessions)
    everything = range(session.length)
    kind = draw(st.sampled_from(["all", "runs", "scattered"]))
    if kind == "all":
        picked = list(everything)
    elif kind == "scattered":
        picked = sorted(draw(st.sets(st.sampled_from(everything), min_size=1, max_size=20)))
    else:
        found: set[int] = set()
        for _ in range(draw(st.integers(1, 3))):
            lo = draw(st.sampled_from(everything))
            found |= set(everything[lo : lo + draw(st.integers(1, 50))])
        picked = sorted(found)
    return session, picked[:most]


def seen_pairs(session: Session, positions: list[int], parts: list[WindowPart]) -> list[tuple[int, int]]:
    """(query position, key position) of every visible pair, as the parts lay them out, with repetitions."""
    pairs = []
    for part in parts:
        n, m = part.groups
        keep = set(range(n * m)) if part.take is None else set(part.take.tolist())
        group = 0
        for segment, index in part.keys:
            for row_of_keys in index.tolist():
                for member in range(m):
                    flat = group * m + member
                    assert part.offsets[flat] == segment.offset
                    if flat not in keep:
                        continue
                    query = positions[int(part.rows[flat])]
                    mask = part.mask[group, member].tolist()
                    for key, bias in zip(row_of_keys, mask, strict=True):
                        assert 0 <= key < segment.length  # also what is hidden must be a row that exists
                        if bias == 0:
                            pairs.append((query, segment.first + key))
                group += 1
        assert group == n
    return pairs


@given(sessions_and_rows(), st.sampled_from([1, 2, 8, 32]))
def test_every_row_sees_its_window_once(case: tuple[Session, list[int]], window: int) -> None:
    session, positions = case
    parts = window_parts(session, torch.tensor(positions), window)
    found = seen_pairs(session, positions, parts)
    expected = [(p, key) for p in positions for key in range(max(p - window + 1, 0), p + 1)]
    assert sorted(found) == expected
    assert sum(part.pairs for part in parts) == len(expected)
    for part in parts:
        # A row that is kept twice from one part would be merged twice.
        kept = part.rows if part.take is None else part.rows[part.take]
        assert len(kept.unique()) == len(kept)
        for segment, index in part.keys:
            assert segment in session.segments
            assert index.dim() == 2


@given(sessions_and_rows(), st.sampled_from([4, 32]))
def test_rows_see_entries_from_their_groups_last_row_on(case: tuple[Session, list[int]], ratio: int) -> None:
    session, positions = case
    found = {position: {} for position in positions}
    for part in entry_parts(session, torch.tensor(positions), ratio):
        number = session.segments.index(part.segment)
        rows = positions[part.row :]
        assert len(rows) == len(part.visible)
        mask = torch.zeros(len(rows), part.count) if part.mask is None else part.mask
        for position, row in zip(rows, mask.tolist(), strict=True):
            found[position][number] = [entry for entry, bias in enumerate(row) if bias == 0]
    for position in positions:
        for number, segment in enumerate(session.segments):
            count = int(segment.visible(torch.tensor([position]), ratio))
            assert found[position].get(number, []) == list(range(count))


def naive_plan(
    session: Session, tail: list[int], fresh: list[int], ratio: int, overlap: bool
) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """(segment, group) -> (positions of its rows, of the group before it); -1 for an empty slot."""
    have, plan = set(tail) | set(fresh), {}
    for number, segment in enumerate(session.segments):
        for group in range(segment.entries(ratio)):
            first = segment.first + group * ratio
            rows = list(range(first, min(first + ratio, segment.stop)))
            if not set(rows) & set(fresh) or not set(rows) <= have:
                continue
            before = [-1] * ratio
            if overlap and group:
                before = list(range(first - ratio, first))
                if not set(before) <= have:
                    continue
            elif overlap and number:
                last = session.segments[number - 1]
                start = last.first + (last.length - 1) // ratio * ratio
                carried = list(range(start, last.stop))
                if set(carried) <= have:
                    before[: len(carried)] = carried
            plan[number, group] = (rows + [-1] * (ratio - len(rows)), before if overlap else [])
    return plan


@given(sessions_and_rows(), st.sampled_from([4, 32]), st.booleans(), st.data())
def test_groups_are_refreshed_from_rows_that_ran(
    small: Oracle, case: tuple[Session, list[int]], ratio: int, overlap: bool, data: st.DataObject
) -> None:
    """Whole groups only, with the group before them; a kept tail counts as run."""
    session, positions = case
    cut = data.draw(st.integers(0, len(positions) - 1))
    tail, fresh = positions[max(cut - 2 * ratio, 0) : cut], positions[cut:]
    rows = RowSet(small.geometry, (session,), (torch.tensor(fresh),))
    plan = group_plan(rows, ratio, overlap, [torch.tensor(tail, dtype=torch.int64)])
    known = [*tail, *fresh, -1]
    found = {}
    for segment, groups, entries in plan.targets:
        number = session.segments.index(segment)
        for row, entry in zip(range(groups.start, groups.stop), entries.tolist(), strict=True):
            own = [known[slot] for slot in plan.own[row].tolist()]
            before = [known[slot] for slot in plan.before[row].tolist()]
            found[number, entry] = (own, before)
            assert int(plan.positions[row]) == segment.start + entry * ratio
    assert found == naive_plan(session, tail, fresh, ratio, overlap)
    assert len(plan.positions) == len(found)


@given(st.lists(sessions_and_rows(), min_size=1, max_size=3))
def test_runs_cover_the_rows_of_a_batch(small: Oracle, cases: list[tuple[Session, list[int]]]) -> None:
    chosen = tuple(torch.tensor(positions) for _, positions in cases)
    rows = RowSet(small.geometry, tuple(session for session, _ in cases), chosen)
    assert rows.size == sum(len(positions) for positions in chosen)
    written = []
    for run in rows.runs:
        length = run.rows.stop - run.rows.start
        assert 0 < length <= run.segment.length
        assert run.first == run.segment.first + run.lo
        assert run.lo + length <= run.segment.length
        written += [(id(run.segment), run.segment.first + run.lo + i) for i in range(length)]
        assert run.rows.stop - run.rows.start == length
    expected = [
        (id(session.segments[int(owner)]), int(position))
        for session, positions in zip(rows.sessions, chosen, strict=True)
        for position, owner in zip(positions, session.segment_of(positions), strict=True)
    ]
    assert written == expected
    frames = [
        int(position) - session.segments[int(session.segment_of(position))].offset
        for session, positions in zip(rows.sessions, chosen, strict=True)
        for position in positions
    ]
    assert rows.frame_positions.tolist() == frames


def test_blocks_are_rows_of_one_session(small: Oracle) -> None:
    length = 2 * BLOCK_ROWS + 44
    sessions_ = (session_of([length], [0]), session_of([5, 64], [0]))
    rows = RowSet(small.geometry, sessions_, (torch.arange(length), torch.arange(3, 69)))
    spans = [(block.rows.start, block.rows.stop) for block in rows.blocks]
    edges = (0, BLOCK_ROWS, 2 * BLOCK_ROWS, length, length + 66)
    assert spans == list(pairwise(edges))
    assert all(block.size <= BLOCK_ROWS for block in rows.blocks)
    assert set(rows.blocks[0].entries) == {4, 32}
    assert rows.blocks[3].positions.tolist() == list(range(3, 69))
