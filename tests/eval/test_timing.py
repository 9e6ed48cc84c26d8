"""Pairs: warm-up, alternating order, states, numbers; documents in any order; arms that lie are not timed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby
from math import factorial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.arms import find_arms
from eval.encoded import encoded
from eval.names import RECOMPUTE
from eval.recorder import Recorder
from eval.results import Rejected, Timing
from eval.timing import COLD_PAIRS, Pairs, Timer, orders, reordered, untimed
from tests.eval.conftest import make_run
from tests.kit.arms import CHECKPOINT, FakeEngine, ran_dense

PROMPT = encoded([([1], False), ([2, 3, 4], True), ([5, 6], True), ([7, 8, 9, 10], True), ([11], False)])
ARMS = find_arms(["turbo", "rowsparse"])
PAIRS = Pairs(3, 10)


@pytest.fixture
def recorder(tmp_path):
    return Recorder(tmp_path, make_run(ARMS), ())


def timer(recorder, pairs=PAIRS, arms=ARMS):
    return Timer(FakeEngine(arms), arms, CHECKPOINT, pairs, recorder)


def timings(recorder):
    return [one for one in recorder.records if isinstance(one, Timing)]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.booleans()), max_size=7),
    st.integers(0, 99),
)
def test_documents_in_another_order_are_the_same_documents(parts, seed):
    prompt = encoded(parts)
    (order,) = orders(len(prompt.spans), 1, seed)
    other = reordered(prompt, order)
    assert sorted(ids.tolist() for ids in other.documents) == sorted(ids.tolist() for ids in prompt.documents)
    assert len(other) == len(prompt)
    assert sorted(other.token_ids.tolist()) == sorted(prompt.token_ids.tolist())


@given(st.integers(0, 5), st.integers(0, 30), st.integers(0, 99))
def test_no_order_comes_twice_before_all_have_come(documents, turns, seed):
    found = orders(documents, turns, seed)
    assert len(found) == turns
    assert len(set(found)) == min(turns, factorial(documents))
    assert all(sorted(order) == list(range(documents)) for order in found)


def test_every_pair_is_two_requests_on_the_same_tokens(recorder):
    timer(recorder).time([("d", "i", PROMPT)])
    found = timings(recorder)
    pairs = [list(pair) for _, pair in groupby(found, key=lambda one: one.pair)]
    assert len(pairs) == 2 * (COLD_PAIRS + 3 + 10)
    assert len({pair[0].pair for pair in pairs}) == len(pairs)
    for pair in pairs:
        assert {one.position for one in pair} == {0, 1}
        assert sum(one.arm == RECOMPUTE for one in pair) == 1
        for name in ("prompt_sha256", "state", "warmup", "prompt_tokens"):
            assert getattr(pair[0], name) == getattr(pair[1], name)


def test_the_order_alternates_and_cold_and_warm_up_come_first(recorder):
    timer(recorder).time([("d", "i", PROMPT)])
    turbo = [one for one in timings(recorder) if one.arm == "turbo"]
    assert [one.position for one in turbo] == [number % 2 for number in range(len(turbo))]
    kinds = [(one.state, one.warmup) for one in turbo]
    assert kinds == [("cold", False)] * COLD_PAIRS + [("hot", True)] * 3 + [("hot", False)] * 10


def test_an_arm_forgets_before_a_cold_pair_and_at_no_other_time(recorder):
    one = timer(recorder)
    one.time([("d", "i", PROMPT)])
    assert Counter(one.engine.forgotten) == {"turbo": COLD_PAIRS, "rowsparse": COLD_PAIRS}


def test_arms_meet_the_same_orders_of_documents(recorder):
    timer(recorder).time([("d", "i", PROMPT)])
    prompts = {
        arm: [one.prompt_sha256 for one in timings(recorder) if one.arm == arm] for arm in ("turbo", "rowsparse")
    }
    assert prompts["turbo"] == prompts["rowsparse"]
    assert len(set(prompts["turbo"])) > 1


def test_what_is_timed_is_not_timed_again_and_new_arms_get_new_pairs(recorder, tmp_path):
    few = {name: ARMS[name] for name in (RECOMPUTE, "turbo")}
    timer(recorder, arms=few).time([("d", "i", PROMPT)])
    before = len(timings(recorder))
    later = timer(recorder)
    later.time([("d", "i", PROMPT)])
    assert {arm for arm, *_ in later.engine.asked} == {RECOMPUTE, "rowsparse"}
    numbers = Counter(one.pair for one in timings(recorder))
    assert len(timings(recorder)) == 2 * before
    assert set(numbers.values()) == {2}
    assert untimed(recorder, "d", "i", ARMS, PAIRS) == []
    assert untimed(recorder, "d", "i", ARMS, Pairs(3, 11)) == ["turbo", "rowsparse"]
    assert untimed(recorder, "d", "j", ARMS, PAIRS) == ["turbo", "rowsparse"]


@pytest.mark.parametrize(
    ("liar", "lie", "reason"),
    [
        ("turbo", ran_dense, "timing: ran dense"),
        ("turbo", lambda reply: replace(reply, prompt_sha256="0"), "timing: unequal tokens"),
        (RECOMPUTE, lambda reply: replace(reply, checkpoint="d"), "timing: recompute beside it unequal checkpoint"),
    ],
)
def test_a_time_that_does_not_count_is_not_recorded(recorder, liar, lie, reason):
    one = timer(recorder)
    one.engine.lie = lambda arm, reply: lie(reply) if arm == liar else reply
    one.time([("d", "i", PROMPT)])
    rejected = [record for record in recorder.records if isinstance(record, Rejected)]
    assert rejected[0].arm == "turbo"
    assert rejected[0].reason.startswith(reason)
    assert "turbo" not in {record.arm for record in timings(recorder)}
    assert "turbo" not in untimed(recorder, "d", "i", ARMS, PAIRS)


def test_times_and_documents_are_the_engines(recorder):
    timer(recorder).time([("d", "i", PROMPT)])
    one = next(record for record in timings(recorder) if record.arm == "turbo")
    assert (one.ttft_request_s, one.ttft_forward_s) == (0.1, 0.09)
    assert sorted(document["reused"] for document in one.report["documents"]) == [2, 3, 4]
    assert set(one.report["documents"][0]) == {"length", "reused", "recomputed", "cached", "reason"}
