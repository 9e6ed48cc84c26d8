"""Compression: pooling against the definition, overlap, partial groups, and transformers' own compressors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from redknot.model.weights import CompressorWeights
from redknot.ops.compressor import overlapped_slots, pool
from redknot.ops.norm import rms_norm
from redknot.ops.rope import inverse_frequencies, rotate, rotation_at
from tests.kit.oracle import Oracle

D, RATIO, EPS = 8, 4, 1e-6
NEG_INF = float("-inf")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(seed: int, series: int) -> CompressorWeights:
    return CompressorWeights(random(RATIO, series * D, seed=seed), 1 + 0.2 * random(D, seed=seed + 1))


def pooled_by_hand(rows: list[tuple[Tensor, Tensor]], norm: Tensor) -> Tensor:
    """Channel by channel in float64: sum of softmax(gate) * value over (value, gate) rows, then the norm."""
    values, gates = (torch.stack(part).double() for part in zip(*rows, strict=True))
    pooled = (values * gates.softmax(0)).sum(0)
    return pooled * (pooled.square().mean() + EPS).rsqrt() * norm.double()


@given(st.integers(1, 4), st.integers(0, 1000), st.booleans())
def test_overlapping_groups_against_the_definition(groups: int, seed: int, carried: bool) -> None:
    """Own second series with the group before's first series, each with its own position bias."""
    w = weights(seed, 2)
    kv, gate = random(groups, RATIO, 2 * D, seed=seed + 2), random(groups, RATIO, 2 * D, seed=seed + 3)
    before = (random(RATIO, 2 * D, seed=seed + 4), random(RATIO, 2 * D, seed=seed + 5)) if carried else (None, None)
    found = pool(w, *overlapped_slots(kv, gate, w.ape, *before), None, EPS)
    for group in range(groups):
        previous = (kv[group - 1], gate[group - 1]) if group else before
        rows = []
        if previous[0] is not None and previous[1] is not None:
            rows += [(previous[0][i, :D], previous[1][i, :D] + w.ape[i, :D]) for i in range(RATIO)]
        rows += [(kv[group, i, D:], gate[group, i, D:] + w.ape[i, D:]) for i in range(RATIO)]
        assert (found[group] - pooled_by_hand(rows, w.norm)).abs().max() <= 1e-5


@given(st.integers(1, RATIO), st.integers(0, 1000), st.booleans())
def test_a_partial_group_pools_what_is_there(present: int, seed: int, poisoned: bool) -> None:
    """A slot without a row has gate -inf; whatever finite value lies in it has no say."""
    w = weights(seed, 1)
    values, gates = random(1, RATIO, D, seed=seed + 2), random(1, RATIO, D, seed=seed + 3) + w.ape
    gates[:, present:] = NEG_INF
    if poisoned:
        values[:, present:] = 1e30
    found = pool(w, values, gates, None, EPS)
    expected = pooled_by_hand([(values[0, i], gates[0, i]) for i in range(present)], w.norm)
    assert (found[0] - expected).abs().max() <= 1e-5


def test_entries_are_turned_to_the_first_row_of_their_group() -> None:
    w = weights(0, 1)
    values, gates, at = random(3, RATIO, D), random(3, RATIO, D, seed=1), torch.tensor([0, 4, 1000])
    from redknot.model.ropespec import RopeSpec

    rotation = rotation_at(at, inverse_frequencies(RopeSpec(10000.0), 4))
    expected = rotate(pool(w, values, gates, None, EPS), rotation)
    assert torch.equal(pool(w, values, gates, rotation, EPS), expected)


@pytest.mark.parametrize("layer", [2, 3])
def test_transformers_compressors(small: Oracle, layer: int) -> None:
    """Entries of whole groups equal those of transformers' module on the same input, HCA and CSA."""
    geometry, w = small.geometry, small.model.weights.layers[layer].attn
    reference = small.reference.model.layers[layer].self_attn.compressor
    ratio, d = geometry.ratio(layer), geometry.head_dim
    length = 2 * ratio + 1  # the last row belongs to an open group
    x = random(1, length, geometry.hidden_size)
    with torch.inference_mode():
        q = torch.zeros(1, length, geometry.q_lora_rank)
        expected = reference(x, q, torch.arange(length)[None], None, layer)[0][0, 0]
        _, kv, gate, *_ = torch.nn.functional.linear(x[0, : 2 * ratio], w.w_in).split(w.in_sizes, -1)
    assert w.compressor is not None
    kv, gate = kv.unflatten(0, (2, ratio)), gate.unflatten(0, (2, ratio))
    overlap = kv.shape[-1] == 2 * d
    slots = overlapped_slots(kv, gate, w.compressor.ape, None, None) if overlap else (kv, gate + w.compressor.ape)
    rotation = rotation_at(torch.tensor([0, ratio]), small.model.frequencies[geometry.rope_compress])
    found = pool(w.compressor, *slots, rotation, geometry.norm_eps)
    assert (found - expected).abs().max() <= 1e-5


@given(st.integers(0, 1000), st.booleans())
def test_rms_norm(seed: int, weighted: bool) -> None:
    x, weight = random(3, 5, D, seed=seed) * 10, random(D, seed=seed + 1) if weighted else None
    expected = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    if weight is not None:
        expected = expected * weight.double()
    assert (rms_norm(x, weight, EPS) - expected).abs().max() <= 1e-5
    assert rms_norm(x.bfloat16(), weight, EPS).dtype == torch.bfloat16
    assert torch.equal(rms_norm(torch.zeros(2, D), weight, EPS), torch.zeros(2, D))
