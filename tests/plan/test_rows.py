"""Row classes as arithmetic: what always runs, what a ranking adds, and what it may not exceed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redknot.model.profile import Profile, Protected, Selector
from redknot.plan.rows import KnownRun, pick_rows, protected_rows, repaired_rows

WINDOW, GROUP = 8, 4


def profile(first: int = 1, last: int = 1, tail: int = 0, indexed: float = 0.05, budget: float = 0.1) -> Profile:
    protected = Protected(first_windows=first, last_windows=last, recent_tail=tail, indexed_share=indexed)
    picks = budget > 0 or indexed > 0
    selector = Selector.INDEXER if picks else Selector.NONE
    return Profile(name="p", budget=budget, protected=protected, selector=selector)


def run(start: int, length: int, doc_start: int = 0, doc_length: int | None = None) -> KnownRun:
    return KnownRun("a", start, doc_start, length, doc_length if doc_length is not None else doc_start + length)


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, list[KnownRun]]:
    """Runs in order, text before, between and behind them or not."""
    at, runs = draw(st.integers(0, 5)), []
    for _ in range(draw(st.integers(1, 4))):
        length, doc_start = draw(st.integers(1, 60)), 8 * draw(st.integers(0, 2))
        runs.append(run(at, length, doc_start, doc_start + length + draw(st.integers(0, 9))))
        at += length + draw(st.integers(0, 6))
    return runs[-1].stop + draw(st.sampled_from([0, 1, 7, 30])), runs


profiles = st.builds(
    profile,
    first=st.integers(0, 2),
    last=st.integers(0, 2),
    tail=st.sampled_from([0, 1, 10, 1000]),
    indexed=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    budget=st.sampled_from([0.0, 0.1, 0.25, 1.0]),
)


def groups_of(runs: list[KnownRun]) -> list[list[int]]:
    """Positions of each group, in the order of a ranking."""
    return [list(range(lo, min(lo + GROUP, one.stop))) for one in runs for lo in range(one.start, one.stop, GROUP)]


def test_first_and_last_windows_of_a_run():
    mask = repaired_rows(run(5, 40), 100, profile(), WINDOW, GROUP)
    assert mask.nonzero().flatten().tolist() == [*range(8), *range(32, 40)]


@pytest.mark.parametrize(("length", "first"), [(41, 32), (42, 32), (43, 32), (44, 36)])
def test_last_windows_are_whole_groups(length, first):
    mask = repaired_rows(run(5, length), 100, profile(first=0), WINDOW, GROUP)
    assert mask.nonzero().flatten().tolist() == list(range(first, length))


def test_an_exact_prefix_is_not_repaired():
    assert not repaired_rows(run(0, 40), 100, profile(), WINDOW, GROUP).any()
    assert repaired_rows(run(0, 40, doc_start=8), 100, profile(), WINDOW, GROUP).any()
    assert repaired_rows(run(8, 40, doc_start=8), 100, profile(), WINDOW, GROUP).any()


def test_the_last_row_runs_with_its_group_where_it_can():
    """A profile that keeps only tails of window latents has nothing to read for the rows in front of the last one."""
    inside = repaired_rows(run(0, 42), 42, profile(), WINDOW, GROUP)
    assert inside.nonzero().flatten().tolist() == [40, 41]
    tails = profile(last=0, indexed=0.0, budget=0.0)
    assert not tails.runs_inside_documents
    assert repaired_rows(run(0, 44), 44, tails, WINDOW, GROUP).nonzero().flatten().tolist() == [43]
    assert not repaired_rows(run(0, 44), 45, tails, WINDOW, GROUP).any()


@pytest.mark.parametrize(("tail", "first"), [(1, 40), (10, 40), (11, 39), (15, 35), (50, 0), (1000, 0)])
def test_the_recent_tail_counts_from_the_end_of_the_request(tail, first):
    mask = repaired_rows(run(5, 40), 55, profile(first=0, last=0, tail=tail), WINDOW, GROUP)
    assert mask.nonzero().flatten().tolist() == list(range(first, 40))


@given(requests(), profiles)
def test_everything_outside_runs_is_protected(request, profile):
    total, runs = request
    mask = protected_rows(total, runs, profile, WINDOW, GROUP)
    inside = torch.zeros(total, dtype=torch.bool)
    for one in runs:
        inside[one.start : one.stop] = True
        assert torch.equal(mask[one.start : one.stop], repaired_rows(one, total, profile, WINDOW, GROUP))
    assert mask[~inside].all()
    assert mask[-1]


@given(requests(), profiles, st.data())
def test_picked_rows(request, profile, data):
    """Classes are disjoint, budgets hold, groups are whole and have the one before them, better ones come first."""
    total, runs = request
    groups = groups_of(runs)
    scores = st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.5])
    ranking = torch.tensor(data.draw(st.lists(scores, min_size=len(groups), max_size=len(groups))))
    topk = data.draw(st.sampled_from([1, 3, 1000]))
    protected = protected_rows(total, runs, profile, WINDOW, GROUP)
    before = protected.clone()
    rows = pick_rows(total, runs, protected, ranking, profile, GROUP, topk)
    assert torch.equal(protected, before)  # not written to
    assert not (rows.protected & rows.active).any()
    assert (rows.protected | ~before).all()
    candidates = int((~before).sum())
    indexed = rows.protected & ~before
    assert int(indexed.sum()) <= int(profile.protected.indexed_share * candidates)
    assert int(rows.active.sum()) <= int(profile.budget * candidates)
    assert torch.equal(rows.running, rows.protected | rows.active)
    opens = {one.start for one in runs}
    fresh = {number for number, group in enumerate(groups) if (indexed | rows.active)[group].any()}
    for number in fresh:
        assert rows.running[groups[number]].all()
    picked = [n for n in fresh if groups[n][0] in opens or rows.running[groups[n - 1]].all()]
    # A group without the one before it came along with the next one, which was picked.
    for number in fresh - set(picked):
        assert rows.running[groups[number + 1]].all()
    # Everything a budget of all candidates leaves out is nothing.
    if profile.budget == 1.0:
        assert rows.running.all()


def expected(ranking: list[float], length: int, indexed: float, budget: float, topk: int = 99) -> tuple[list, list]:
    """Groups of a run that are I and Active when only the ranking decides; the first window protects two groups."""
    one = [run(4, length)]
    chosen = profile(last=0, indexed=indexed, budget=budget)
    protected = protected_rows(4 + length + 4, one, chosen, WINDOW, GROUP)
    rows = pick_rows(4 + length + 4, one, protected, torch.tensor(ranking), chosen, GROUP, topk)

    def of(mask: torch.Tensor) -> list[int]:
        return [number for number, group in enumerate(groups_of(one)) if mask[group].all()]

    return of(rows.protected & ~protected), of(rows.active)


def test_ties_go_to_the_lower_position_and_predecessors_come_along():
    # 40 candidates: groups 2..11. I may take 10 % = one group: group 2, whose predecessor is protected.
    assert expected([1.0] * 12, 48, 0.1, 0.1) == ([2], [3])
    # Group 7 is the best: with group 6 it is 8 rows, so Active needs a fifth of the candidates.
    ranking = [0.0] * 7 + [5.0] + [0.0] * 4
    assert expected(ranking, 48, 0.2, 0.1) == ([6, 7], [2])
    assert expected(ranking, 48, 0.1, 0.2) == ([], [6, 7])
    assert expected(ranking, 48, 0.0, 0.1) == ([], [2])


def test_a_share_that_no_group_fills_does_not_starve_the_next_class():
    """5 of 40 rows: one group fits, the next does not; Active still gets its share."""
    assert expected([1.0] * 12, 48, 5 / 40, 0.2) == ([2], [3, 4])
    # Three rows: no group fits at all.
    assert expected([1.0] * 12, 48, 3 / 40, 0.1) == ([], [2])


def test_at_most_topk_groups_are_indexed():
    assert expected([1.0] * 12, 48, 1.0, 0.1, topk=3) == ([2, 3, 4], [5])


def test_a_short_last_group_counts_its_rows():
    one = [run(0, 10)]
    chosen = profile(first=0, last=0, indexed=0.0, budget=0.2)
    protected = protected_rows(12, one, chosen, WINDOW, GROUP)
    rows = pick_rows(12, one, protected, torch.tensor([0.0, 0.0, 9.0]), chosen, GROUP, 99)
    assert not rows.active.any()  # 2 rows and the 4 before them do not fit 2
    chosen = profile(first=0, last=0, indexed=0.0, budget=0.6)
    rows = pick_rows(12, one, protected, torch.tensor([0.0, 0.0, 9.0]), chosen, GROUP, 99)
    assert rows.active.nonzero().flatten().tolist() == [4, 5, 6, 7, 8, 9]
