"""Worlds: statements within capacity, the second of a pair behind the first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redknot.nano import worlds


def test_facts_are_spread_over_documents_within_capacity() -> None:
    rng = np.random.default_rng(0)
    for n_documents, capacity in [(2, 1), (3, 3), (8, 2), (5, 1)]:
        for n_pairs in range(n_documents * capacity // 2 + 1):
            facts = worlds.draw_facts(rng, "train", n_documents * capacity - n_pairs)
            pairs = [(worlds.restate(rng, "train", fact), fact) for fact in facts[:n_pairs]]
            placed = worlds.place(rng, n_documents, capacity, facts[n_pairs:], pairs)
            assert [len(part) for part in placed] == [capacity] * n_documents
            for old, new in pairs:
                where = {fact: index for index, part in enumerate(placed) for fact in part}
                assert where[old] < where[new]


@pytest.mark.parametrize("task", ["latest", "owner", "about"])
def test_tasks_of_two_documents_refuse_one(task: str) -> None:
    with pytest.raises(ValueError, match="two documents or more"):
        worlds.TASKS[task](np.random.default_rng(0), "test", 1, 4, 1)


def test_nothing_unnamed_stands_in_front_of_its_subject() -> None:
    for seed in range(20):
        world = worlds.TASKS["about"](np.random.default_rng(seed), "test", 5, 3, 4)
        assert len(world.asked) >= 4
        for number, said in enumerate(world.documents):
            kinds = [type(one) for one in said]
            assert kinds.count(worlds.Subject) == (number in (0, 2))
            assert (worlds.Unnamed in kinds) == (number in (1, 3))
            assert len(said) <= 4


@given(st.integers(2, 8), st.integers(1, 4), st.integers(0, 1000), st.sampled_from([0.0, 0.5, 1.0]))
def test_pairs_fit_however_many_are_neighbours(n_documents: int, capacity: int, seed: int, near: float) -> None:
    """No document above its capacity, the later statement in a later document, neighbours where wanted and possible."""
    rng = np.random.default_rng(seed)
    n_pairs = n_documents * capacity // 2
    facts = worlds.draw_facts(rng, "train", n_pairs)
    pairs = [(worlds.restate(rng, "train", fact), fact) for fact in facts]
    placed = worlds.place(rng, n_documents, capacity, [], pairs, near)
    assert max(len(document) for document in placed) <= capacity
    where = {fact: index for index, document in enumerate(placed) for fact in document}
    gaps = [where[later] - where[earlier] for earlier, later in pairs]
    assert all(gap >= 1 for gap in gaps)
    if near == 1.0 and gaps:
        assert gaps[0] == 1 or n_pairs * 2 == n_documents * capacity
