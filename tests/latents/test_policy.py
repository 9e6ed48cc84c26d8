"""Eviction policies against models that look at every key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redknot.config import EVICTIONS
from redknot.latents.policy import POLICIES, Eviction, GreedyDual, Lru

STEPS = st.lists(st.tuples(st.sampled_from("add discard evict readd".split()), st.integers(0, 5), st.integers(0, 4)))


@given(steps=STEPS)
def test_lru_evicts_what_was_added_longest_ago(steps: list[tuple[str, int, int]]) -> None:
    policy: Eviction[int] = Lru()
    model: list[int] = []
    for step, key, cost in steps:
        if step in ("discard", "readd") and key in model:
            policy.discard(key)
            model.remove(key)
        if step in ("add", "readd") and key not in model:
            policy.add(key, float(cost))
            model.append(key)
        if step == "evict" and model:
            count = min(len(model), 1 + cost)
            if cost:
                assert policy.evict(count) == model[:count]
            else:
                policy.evicted(model[0])
            del model[:count]
        assert policy.victim() == (model[0] if model else None)
        assert list(policy) == model


@given(steps=STEPS)
def test_greedy_dual_evicts_the_least_worth(steps: list[tuple[str, int, int]]) -> None:
    policy: Eviction[int] = GreedyDual()
    model: dict[int, tuple[float, int]] = {}  # worth, then age
    inflation = 0.0
    for age, (step, key, cost) in enumerate(steps):
        if step in ("discard", "readd") and key in model:
            policy.discard(key)
            del model[key]
        if step in ("add", "readd") and key not in model:
            policy.add(key, float(cost))
            model[key] = (inflation + cost, age)
        if step == "evict" and model:
            victim = min(model, key=lambda key: model[key])
            policy.evicted(victim)
            inflation = model.pop(victim)[0]
        assert policy.victim() == min(model, key=lambda key: model[key], default=None)
        assert sorted(policy) == sorted(model)


@pytest.mark.parametrize("policy", [Lru(), GreedyDual()])
def test_a_policy_keeps_nothing_of_keys_that_left(policy: Lru | GreedyDual) -> None:
    policy.add(-1, 1.0)  # stays the victim, so that nothing is ever looked at behind it
    for key in range(10_000):
        policy.add(key, 2.0)
        policy.discard(key)
    assert list(policy) == [-1]
    assert len(getattr(policy, "_heap", ())) < 16


@pytest.mark.parametrize("policy", [Lru(), GreedyDual()])
def test_keys_that_are_not_there_are_a_mistake(policy: Lru | GreedyDual) -> None:
    with pytest.raises(KeyError):
        policy.discard(1)
    with pytest.raises(KeyError):
        policy.evicted(1)
    assert policy.victim() is None


def test_what_can_be_configured_is_what_there_is() -> None:
    assert tuple(POLICIES) == EVICTIONS


def test_greedy_dual_takes_out_several() -> None:
    policy: Eviction[int] = GreedyDual()
    for key, cost in enumerate((3.0, 1.0, 2.0, 5.0)):
        policy.add(key, cost)
    assert policy.evict(3) == [1, 2, 0]
    policy.add(4, 3.0)  # worth 3 more than what left, which is more than a block of cost 5 from the beginning
    assert policy.evict(2) == [3, 4]
