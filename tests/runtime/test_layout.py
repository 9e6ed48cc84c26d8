"""The layout against the definitions it is arithmetic for: who writes where, who sees what, which groups are whole."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from redknot.latents.session import Session
from redknot.runtime.layout import BLOCK_ROWS, RowSet, group_plan
from tests.kit.oracle import Oracle
from tests.kit.sessions import session_of, sessions_and_rows


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
    rows_of_groups = iter(range(len(plan.positions)))
    for segment, entries in plan.targets:
        number = session.segments.index(segment)
        for entry, row in zip(entries.tolist(), rows_of_groups, strict=False):
            own = [known[slot] for slot in plan.own[row].tolist()]
            before = [known[slot] for slot in plan.before[row].tolist()]
            found[number, entry] = (own, before)
            assert int(plan.positions[row]) == segment.start + entry * ratio
    assert found == naive_plan(session, tail, fresh, ratio, overlap)
    ((index, kept),) = plan.tails
    assert kept.tolist() == [*tail, *fresh][-ratio * (2 if overlap else 1) :]
    assert [known[slot] for slot in index.tolist()] == kept.tolist()
    assert len(plan.positions) == len(found)


@given(st.lists(sessions_and_rows(), min_size=1, max_size=3))
def test_writes_cover_the_rows_of_a_batch(small: Oracle, cases: list[tuple[Session, list[int]]]) -> None:
    chosen = tuple(torch.tensor(positions) for _, positions in cases)
    rows = RowSet(small.geometry, tuple(session for session, _ in cases), chosen)
    assert rows.size == sum(len(positions) for positions in chosen)
    written = []
    for write in rows.writes:
        picked = (
            list(range(write.into.start, write.into.stop)) if isinstance(write.into, slice) else write.into.tolist()
        )
        assert 0 <= min(picked) <= max(picked) < write.segment.length
        assert write.rows.start == len(written)
        written += [(id(write.segment), write.segment.first + row) for row in picked]
        assert write.rows.stop == len(written)
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
