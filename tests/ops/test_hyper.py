"""Hyper-connections: Sinkhorn's fixed point, and transformers' own modules on the same streams."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from redknot.ops.hyper import collapse, enter, leave, sinkhorn
from tests.kit.oracle import Oracle


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(2, 6), st.integers(1, 4), st.integers(0, 1000))
def test_sinkhorn_makes_matrices_doubly_stochastic(streams: int, rows: int, seed: int) -> None:
    found = sinkhorn(random(streams, streams, rows, seed=seed).softmax(1), 60, 1e-6)
    assert bool((found >= 0).all())
    assert (found.sum(0) - 1).abs().max() <= 1e-5
    assert (found.sum(1) - 1).abs().max() <= 1e-3


def test_sinkhorn_leaves_the_identity_alone() -> None:
    identity = torch.eye(3).unsqueeze(-1)
    assert (sinkhorn(identity, 20, 1e-6) - identity).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["small", "wide"])
@pytest.mark.parametrize("block", ["attn", "ffn"])
def test_transformers_hyper_connection(name: str, block: str, request: pytest.FixtureRequest) -> None:
    oracle: Oracle = request.getfixturevalue(name)
    geometry, layer = oracle.geometry, oracle.model.weights.layers[2]
    streams = random(7, geometry.hc_mult, geometry.hidden_size)
    with torch.inference_mode():
        post, comb, collapsed = getattr(oracle.reference.model.layers[2], f"{block}_hc")(streams[None])
    x, mixing = enter(getattr(layer, f"{block}_hc"), streams, geometry)
    assert (x - collapsed[0]).abs().max() <= 1e-5
    assert (mixing.post - post[0]).abs().max() <= 1e-5
    assert (mixing.comb - comb[0]).abs().max() <= 1e-5
    assert (mixing.comb.sum(-2) - 1).abs().max() <= 1e-4
    assert (mixing.comb.sum(-1) - 1).abs().max() <= 1e-3
    # The way back: post * output + comb^T streams.
    output = random(7, geometry.hidden_size, seed=1)
    expected = post[0].unsqueeze(-1) * output.unsqueeze(1) + torch.einsum("tij,tid->tjd", comb[0], streams)
    assert (leave(mixing, output, streams) - expected).abs().max() <= 1e-5
    picked = torch.tensor([5, 0])
    part = leave(mixing.of(picked), output[picked], streams[picked])
    assert (part - expected[picked]).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["small", "wide"])
def test_transformers_collapse(name: str, request: pytest.FixtureRequest) -> None:
    oracle: Oracle = request.getfixturevalue(name)
    geometry = oracle.geometry
    streams = random(7, geometry.hc_mult, geometry.hidden_size)
    with torch.inference_mode():
        expected = oracle.reference.model.hc_head(streams[None])[0]
    assert (collapse(oracle.model.weights.head_hc, streams, geometry) - expected).abs().max() <= 1e-5


def test_streams_are_left_as_they_were(small: Oracle) -> None:
    geometry, layer = small.geometry, small.model.weights.layers[0]
    streams = random(5, geometry.hc_mult, geometry.hidden_size)
    before = streams.clone()
    x, mixing = enter(layer.attn_hc, streams, geometry)
    leave(mixing, x, streams)
    assert torch.equal(streams, before)
