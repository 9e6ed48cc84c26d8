"""The merge of many parts: kernel against float32, unset memory in empty parts, every kind of sink."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redknot.ops import merge as reference
from redknot.ops.attention import Partial
from tests.kit.kernels import DEVICE, NAN, integers, random, strided, worst

from redknot.ops import merge_triton as kernel  # isort: skip

INF = float("inf")
# Float32: a log-sum-exp of 100 is good to 4e-6, and so are the shares taken from it.
ALLOWED = 1e-5


def compare(outputs: Tensor, lses: Tensor, sinks: Tensor | None) -> Partial:
    found = kernel.merge_segments(outputs, lses, sinks)
    expected = reference.merge_segments(outputs, lses, sinks)
    assert worst(found.output, expected.output) <= ALLOWED
    assert worst(found.lse, expected.lse) <= ALLOWED
    return found


def parts(count: int, rows: int, heads: int, d: int, seed: int) -> tuple[Tensor, Tensor]:
    """Parts of which some saw nothing and hold NaN, with LSEs from -60 to 60."""
    outputs, lses = random(count, rows, heads, d, seed=seed), random(count, rows, heads, seed=seed + 1) * 20
    empty = integers(0, 3, count, rows, heads, seed=seed + 2) == 0
    return strided(outputs.masked_fill(empty.unsqueeze(-1), NAN)), strided(lses.masked_fill(empty, -INF))


@given(
    count=st.integers(0, 5),
    rows=st.integers(0, 3),
    heads=st.sampled_from([1, 7, 8, 9]),
    d=st.sampled_from([1, 24, 32]),
    seed=st.integers(0, 10**6),
    sunk=st.booleans(),
)
@settings(max_examples=20)
def test_any_shape(count: int, rows: int, heads: int, d: int, seed: int, sunk: bool) -> None:
    sinks = random(heads, seed=seed + 3) * 20
    sinks[integers(0, 5, heads, seed=seed) == 0] = INF
    sinks[integers(0, 5, heads, seed=seed + 1) == 0] = -INF
    compare(*parts(count, rows, heads, d, seed), strided(sinks) if sunk else None)


def test_the_geometry_of_flash() -> None:
    compare(*parts(9, 1, 64, 512, 0), random(64))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy says so; a GPU does not
@pytest.mark.parametrize("sink", [0.0, 300.0, -300.0, INF, -INF])
def test_every_kind_of_sink(sink: float) -> None:
    """Over ordinary rows, over rows that saw nothing, and over LSEs that exp cannot hold."""
    outputs, lses = random(2, 3, 1, 24), torch.tensor([[0.0, -INF, 200.0], [1.0, -INF, -200.0]], device=DEVICE)
    found = compare(outputs, lses.unsqueeze(-1), torch.tensor([sink], device=DEVICE))
    assert not found.output[1].any()
    if sink == INF:
        assert not found.output.any()
    if sink == -INF:
        assert torch.equal(found.output, kernel.merge_segments(outputs, lses.unsqueeze(-1), None).output)


def test_one_part_is_itself() -> None:
    outputs, lses = random(1, 3, 2, 24), random(1, 3, 2)
    found = compare(outputs, lses, None)
    assert torch.equal(found.output, outputs[0])
    assert torch.equal(found.lse, lses[0])


def test_the_order_of_parts_means_nothing() -> None:
    outputs, lses = parts(4, 3, 2, 24, 5)
    one, other = kernel.merge_segments(outputs, lses, None), kernel.merge_segments(outputs.flip(0), lses.flip(0), None)
    assert worst(one.output, other.output) <= ALLOWED
    assert worst(one.lse, other.lse) <= ALLOWED
