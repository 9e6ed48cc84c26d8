"""What a model's layers call: chosen once, from the device and the shapes, with every refusal named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from redknot.errors import ConfigError
from redknot.ops import dispatch, indexer, merge, moe, projection, segment
from redknot.ops.dispatch import Machine, Mode, Op
from redknot.runtime.model import Model
from redknot.runtime.operations import choose_operations
from tests.kit.tiny import tiny_model

CUDA = torch.device("cuda")
HOPPER = Machine("cuda", (9, 0), has_triton=True, interpreted=False)


def test_the_cpu_runs_references_over_turned_copies() -> None:
    model = tiny_model("nano")
    found = model.operations
    assert found is model.operations
    assert (found.in_place, found.reasons, found.passed_over) == (False, {}, "")
    assert found.attend is segment.segment_attention
    assert found.merge is merge.merge_segments
    assert found.scores is indexer.segment_scores
    assert found.project is projection.project_rows_
    assert found.experts is moe.experts_forward


def test_a_gpu_without_triton_runs_references_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "machine_of", lambda _: replace(HOPPER, has_triton=False))
    found = choose_operations(tiny_model("nano").geometry, 4, torch.float32, CUDA)
    assert not found.in_place
    assert set(found.reasons) == {Op.SEGMENT_ATTENTION, Op.MERGE, Op.PROJECTION, Op.SCORES, Op.EXPERTS}
    assert all(reason.startswith("triton is not installed") for reason in found.reasons.values())
    assert found.passed_over == "dtype float32 is not bfloat16"


def test_kernels_that_were_asked_for_are_an_error_where_there_are_none() -> None:
    pytest.importorskip("triton")
    model = tiny_model("nano")
    with pytest.raises(ConfigError, match=r"kernel segment_attention: .*8 channels are odd or fewer than 16"):
        _ = Model(model.geometry, model.weights, mode=Mode.KERNEL).operations


def test_a_model_without_an_indexer_asks_for_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "machine_of", lambda _: replace(HOPPER, has_triton=False))
    assert Op.SCORES not in choose_operations(tiny_model("sliding").geometry, 4, torch.float32, CUDA).reasons
