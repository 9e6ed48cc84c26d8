"""One model in memory under several engines: weights are shared, everything else is each engine's own."""

from __future__ import annotations

import pytest
import torch

from redknot.comm.group import OneProcess
from redknot.errors import CheckpointError, ConfigError
from redknot.model.weights import named_tensors
from redknot.runtime.engine import Engine
from redknot.runtime.loaded import load
from tests.kit.requests import document
from tests.runtime.conftest import Served

QUESTION = document(20, 7)


def test_engines_of_one_model_share_its_weights_and_nothing_else(served: Served) -> None:
    segments = [*served.documents[:2], QUESTION]
    with Engine(served.checkpoint, served.store, "turbo") as first:
        second = Engine(first.loaded, served.store, "rowsparse")
        pairs = zip(named_tensors(first.model.weights), named_tensors(second.model.weights), strict=True)
        assert all(mine.data_ptr() == its.data_ptr() for (_, mine), (_, its) in pairs)
        assert second.tokenizer is first.tokenizer
        assert second.loaded.identity is first.loaded.identity
        assert second.latents is not first.latents
        expected = {engine: engine.generate(segments=segments, max_new_tokens=3) for engine in (first, second)}
        assert [result.report.profile for result in expected.values()] == ["turbo", "rowsparse"]
        assert all(result.report.arm == "reuse" for result in expected.values())
        assert (
            expected[first].token_ids == served.engine("turbo").generate(segments=segments, max_new_tokens=3).token_ids
        )
    with second:  # the first one is closed
        again = second.generate(segments=segments, max_new_tokens=3)
        assert again.token_ids == expected[second].token_ids
        assert torch.equal(again.logits, expected[second].logits)
        assert second.check_books() == []


def test_each_engine_has_its_own_namespace_and_store(served: Served) -> None:
    loaded = load(served.checkpoint)
    segments = [served.documents[0], QUESTION]
    with Engine(loaded, served.store, namespace="nobody") as stranger, Engine(loaded) as without:
        assert stranger.generate(segments=segments, max_new_tokens=1).report.reused_tokens == 0
        assert without.library is None


def test_a_loaded_model_has_its_group(served: Served) -> None:
    with pytest.raises(ConfigError, match="a loaded model has its group"):
        Engine(load(served.checkpoint), group=OneProcess())


def test_a_folder_without_a_checkpoint(tmp_path) -> None:
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_first_logits_come_with_the_result(served: Served) -> None:
    """Of every arm; they choose the first token, and a caller may write to them."""
    for reuse in ("auto", "off"):
        result = served.engine().generate(segments=[served.documents[4], QUESTION], reuse=reuse, max_new_tokens=3)
        assert (result.logits.dtype, tuple(result.logits.shape)) == (torch.float32, (2048,))
        assert int(result.logits.argmax()) == result.token_ids[0]
        assert not result.logits.is_inference()
        result.logits.zero_()
