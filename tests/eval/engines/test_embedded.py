"""The embedded engine behind the harness: what it says that it answered, arms apart, and cold starts."""

from __future__ import annotations

from contextlib import closing

import pytest

from eval.arms import find_arms
from eval.artifacts import Builder, targets
from eval.encoder import Encoder
from eval.engines.embedded import EmbeddedEngine
from eval.guard import objection
from eval.items import Item
from eval.names import RECOMPUTE
from eval.provenance import checkpoint_identity
from redknot.errors import InputError
from redknot.model.geometry import load_geometry
from tests.kit.corpus import document

ARMS = find_arms(["turbo"])


@pytest.fixture(scope="module")
def prompt(checkpoint):
    parts = ((document(100, 1), True), (document(90, 2), True), ("\nAnswer:", False))
    return Encoder.load(checkpoint).encode(Item("d", "1", "1", parts, ("x",), 3, len))


@pytest.fixture
def engine(checkpoint, prompt, tmp_path):
    wanted = targets(load_geometry(checkpoint), [arm.profile for arm in ARMS.values()], 1)
    Builder(checkpoint, tmp_path / "store", wanted).build("d", prompt.documents)
    with closing(EmbeddedEngine(checkpoint, tmp_path / "store", ARMS)) as opened:
        yield opened


def test_a_reply_says_what_was_answered_by_what(engine, checkpoint, prompt):
    digest = checkpoint_identity(checkpoint).digest
    for name, arm in ARMS.items():
        reply = engine.answer(name, prompt, 3)
        assert objection(reply, prompt, 3, digest, arm.profile) is None
        assert reply.token_ids[0] == int(reply.logits.argmax())
        assert reply.ttft_request_s >= reply.ttft_forward_s > 0
    assert reply.report["arm"] == "reuse"
    assert engine.answer(RECOMPUTE, prompt, 3).report["reason"] == "reuse_off"


def test_what_an_arm_forgets_is_read_again(engine, prompt):
    def found():
        return engine.answer("turbo", prompt, 1).report["latents"]["found"]

    assert found() == 0
    assert found() > 0
    engine.forget("turbo")
    assert found() == 0


def test_a_store_that_nobody_built_is_empty_and_the_request_says_so(checkpoint, prompt, tmp_path):
    with closing(EmbeddedEngine(checkpoint, tmp_path / "none", ARMS)) as engine:
        assert engine.answer("turbo", prompt, 1).report["reason"] == "nothing_to_reuse"


def test_a_prompt_that_does_not_fit_is_refused(engine, prompt):
    with pytest.raises(InputError, match="exceed the model's 600 positions"):
        engine.answer("turbo", prompt, 500)
