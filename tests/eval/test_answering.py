"""One question through all arms: identical prompts and caps, logits against recompute, rejections."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eval.answering import Question, ask
from eval.arms import find_arms
from eval.encoded import encoded
from eval.names import NO_DOCUMENTS, RECOMPUTE
from tests.kit.arms import CHECKPOINT, FakeEngine, ran_dense

PROMPT = encoded([([1], False), ([2, 3, 4], True), ([5], False)])
ALONE = encoded([([1, 5], False)])
ARMS = find_arms(["turbo", "rowsparse"])
ALL = (*ARMS, NO_DOCUMENTS)


@pytest.fixture
def engine():
    return FakeEngine(ARMS)


def outcomes(engine, arms=ALL):
    return {one.arm: one for one in ask(engine, ARMS, Question("d", "i", PROMPT, ALONE, 7, arms), CHECKPOINT)}


def test_all_arms_get_the_same_prompt_and_cap(engine):
    found = outcomes(engine)
    assert list(found) == list(ALL)
    assert engine.asked == [*((arm, PROMPT.sha256, 7) for arm in ARMS), (RECOMPUTE, ALONE.sha256, 7)]
    assert {one.prompt_sha256 for arm, one in found.items() if arm != NO_DOCUMENTS} == {PROMPT.sha256}
    assert found[NO_DOCUMENTS].prompt_tokens == len(ALONE)


def test_logits_are_held_to_recompute(engine):
    found = outcomes(engine)
    assert found["turbo"].kl > 0
    assert found["turbo"].top1 is True
    assert found[RECOMPUTE].kl is found[NO_DOCUMENTS].kl is None


def test_an_arm_that_comes_later_still_has_recompute_beside_it(engine):
    found = outcomes(engine, ("turbo",))
    assert list(found) == ["turbo"]
    assert found["turbo"].kl > 0
    assert [arm for arm, *_ in engine.asked] == [RECOMPUTE, "turbo"]


def test_an_engine_without_logits_is_no_error(engine):
    engine.lie = lambda arm, reply: replace(reply, logits=None)
    assert outcomes(engine)["turbo"].kl is None


def test_a_dense_reuse_arm_is_rejected_and_the_others_count(engine):
    engine.lie = lambda arm, reply: ran_dense(reply) if arm == "turbo" else reply
    found = outcomes(engine)
    assert str(found["turbo"].rejected).startswith("ran dense")
    assert [arm for arm, one in found.items() if one.rejected] == ["turbo"]


def test_nothing_is_compared_with_a_recompute_that_does_not_count(engine):
    engine.lie = lambda arm, reply: replace(reply, checkpoint="d") if arm == RECOMPUTE else reply
    found = outcomes(engine)
    assert found[RECOMPUTE].rejected
    assert found[NO_DOCUMENTS].rejected
    assert found["turbo"].kl is None
