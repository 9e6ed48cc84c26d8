"""Experts: routing against transformers' routers, fan-out, grouped against dense, ranks, dropped pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from redknot.model.weights import MoeWeights
from redknot.ops import moe
from redknot.ops.moe import FanOut, Routing, experts_forward, fan_out_mask, gated, route
from redknot.runtime.counters import Counters
from tests.kit.oracle import Oracle

EXPERTS, HIDDEN, WIDTH, SHARED, LIMIT = 8, 12, 6, 4, 1.0


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_moe(seed: int) -> MoeWeights:
    return MoeWeights(
        gate=random(EXPERTS, HIDDEN, seed=seed),
        bias=random(EXPERTS, seed=seed + 1),
        tid2eid=None,
        w13=random(EXPERTS, 2 * WIDTH, HIDDEN, seed=seed + 2) * 0.3,
        w2=random(EXPERTS, HIDDEN, WIDTH, seed=seed + 3) * 0.3,
        first_expert=0,
        shared_w13=random(2 * SHARED, HIDDEN, seed=seed + 4) * 0.3,
        shared_w2=random(HIDDEN, SHARED, seed=seed + 5) * 0.3,
    )


def random_routing(rows: int, k: int, seed: int) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(rows, EXPERTS, generator=generator).argsort(-1)[:, :k]
    return Routing(experts, torch.rand(rows, k, generator=generator), None)


def dense(weights: MoeWeights, x: Tensor, routing: Routing) -> Tensor:
    """Every expert on every row, weighted afterwards."""
    out = gated(x, weights.shared_w13, weights.shared_w2, LIMIT)
    for column in range(routing.experts.shape[1]):
        for row, expert in enumerate(routing.experts[:, column].tolist()):
            index = expert - weights.first_expert
            if 0 <= index < len(weights.w13) and (routing.kept is None or bool(routing.kept[row, column])):
                part = gated(x[row : row + 1], weights.w13[index], weights.w2[index], LIMIT)
                out[row] += part[0] * routing.weights[row, column]
    return out


shares = st.lists(st.floats(0.001, 1.0), min_size=6, max_size=6)


@given(st.lists(shares, min_size=1, max_size=5), st.integers(1, 6), st.floats(0.05, 0.999))
def test_fan_out_keeps_the_fewest_that_reach_tau(rows: list[list[float]], k_min: int, tau: float) -> None:
    weights = torch.tensor(rows, dtype=torch.float64)
    kept = fan_out_mask(weights, FanOut(k_min, tau))
    for row, mask in zip(weights, kept, strict=True):
        best = row.sort(descending=True).values
        total, k = best.sum(), int(mask.sum())
        assert k >= k_min
        # It reaches tau with k, and does not with k - 1 (1e-9 for sums in another order).
        assert best[:k].sum() >= (tau - 1e-9) * total
        assert k == k_min or best[: k - 1].sum() < (tau + 1e-9) * total
        assert row[mask].sum() >= best[:k].sum() - 1e-12  # the largest ones


def test_fan_out_of_equal_weights_keeps_the_earlier_columns() -> None:
    kept = fan_out_mask(torch.full((1, 6), 0.25), FanOut(3, 0.5))
    assert kept.tolist() == [[True] * 3 + [False] * 3]


@given(st.lists(shares, min_size=1, max_size=5), st.floats(0.01, 0.5))
def test_three_of_six_always_reach_one_half(rows: list[list[float]], tau: float) -> None:
    """Why the published setting is a fixed top 3."""
    assert bool((fan_out_mask(torch.tensor(rows, dtype=torch.float64), FanOut(3, tau)).sum(-1) == 3).all())


@pytest.mark.parametrize("layer", [1, 3])
def test_routers_are_transformers(small: Oracle, layer: int) -> None:
    geometry, weights = small.geometry, small.model.weights.layers[layer].moe
    x, ids = random(20, geometry.hidden_size), torch.arange(20)
    gate = small.reference.model.layers[layer].mlp.gate
    with torch.inference_mode():
        _, expected, experts = gate(x[None], ids[None]) if geometry.hash_layers[layer] else gate(x[None])
    found = route(weights, x, ids, geometry)
    assert found.kept is None
    by_expert = [
        torch.zeros(20, geometry.num_experts).scatter(1, i, w) for i, w in ((experts, expected), found_pair(found))
    ]
    assert (by_expert[0] - by_expert[1]).abs().max() <= 1e-6


def found_pair(routing: Routing) -> tuple[Tensor, Tensor]:
    return routing.experts, routing.weights


@pytest.mark.parametrize("layer", [1, 3])
def test_fan_out_renormalises_nothing(small: Oracle, layer: int) -> None:
    """Kept experts have the weight they had, dropped ones none; k_min 6 is the native router."""
    geometry, weights = small.geometry, small.model.weights.layers[layer].moe
    x, ids = random(50, geometry.hidden_size), torch.arange(50)
    native = route(weights, x, ids, geometry)
    pruned = route(weights, x, ids, geometry, FanOut(2, 0.7))
    assert pruned.kept is not None
    assert torch.equal(pruned.experts, native.experts)
    assert torch.equal(pruned.weights, native.weights * pruned.kept)
    assert torch.equal(pruned.kept, fan_out_mask(native.weights, FanOut(2, 0.7)))
    assert 2 <= int(pruned.kept.sum(-1).min()) < int(pruned.kept.sum(-1).max())
    assert route(weights, x, ids, geometry, FanOut(6, 0.1)).kept is None


@given(st.integers(0, 9), st.integers(1, 6), st.integers(0, 1000))
def test_grouped_equals_dense(rows: int, k: int, seed: int) -> None:
    weights, x, routing = random_moe(seed), random(rows, HIDDEN, seed=seed), random_routing(rows, k, seed)
    found, ran = experts_forward(weights, x, routing, LIMIT)
    assert ran == rows * k
    assert rows == 0 or (found - dense(weights, x, routing)).abs().max() <= 1e-5


@given(st.integers(1, 9), st.integers(0, 1000))
def test_dropped_pairs_never_reach_an_expert(rows: int, seed: int) -> None:
    """Rows seen by the expert products are the kept pairs, no more; a dropped pair could not even leave a NaN."""
    weights, x = random_moe(seed), random(rows, HIDDEN, seed=seed)
    routing = random_routing(rows, 6, seed)
    kept = fan_out_mask(routing.weights, FanOut(1, 0.6))
    poisoned = Routing(routing.experts, torch.where(kept, routing.weights, float("nan")), kept)
    seen: list[int] = []
    native = moe.gated

    def counted(rows_in: Tensor, *rest: Any) -> Tensor:
        seen.append(len(rows_in))
        return native(rows_in, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "gated", counted)
        found, ran = experts_forward(weights, x, poisoned, LIMIT)
    assert seen[0] == rows  # the shared expert
    assert sum(seen[1:]) == ran == int(kept.sum())
    assert 0 not in seen[1:]
    assert (found - dense(weights, x, poisoned)).abs().max() <= 1e-5
    counters = Counters()
    counters.add_experts(poisoned, ran, HIDDEN, WIDTH, SHARED)
    counters.settle()
    assert counters.expert_pairs == ran
    assert counters.expert_pairs_native == rows * 6
    assert counters.fan_out == {k: n for k in range(7) if (n := int((kept.sum(-1) == k).sum()))}
    assert counters.flops == 2 * HIDDEN * 3 * (ran * WIDTH + rows * SHARED)


@given(st.sampled_from([2, 4, 8]), st.integers(1, 9), st.integers(0, 1000), st.booleans())
def test_expert_ranges_of_ranks_sum_to_the_whole(world: int, rows: int, seed: int, pruned: bool) -> None:
    weights, x, routing = random_moe(seed), random(rows, HIDDEN, seed=seed), random_routing(rows, 6, seed)
    if pruned:
        kept = fan_out_mask(routing.weights, FanOut(2, 0.5))
        routing = Routing(routing.experts, routing.weights * kept, kept)
    whole, ran = experts_forward(weights, x, routing, LIMIT)
    parts, pairs = torch.zeros_like(whole), 0
    each = EXPERTS // world
    for rank in range(world):
        mine = slice(rank * each, (rank + 1) * each)
        part = replace(weights, w13=weights.w13[mine], w2=weights.w2[mine], first_expert=mine.start)
        if rank:  # the shared expert is divided by width; here the first rank has all of it
            part = replace(part, shared_w2=torch.zeros_like(weights.shared_w2))
        found, count = experts_forward(part, x, routing, LIMIT)
        parts += found
        pairs += count
    assert pairs == ran
    assert (parts - whole).abs().max() <= 1e-5


def test_the_clamp() -> None:
    """The gate is clamped from above only, the up projection on both sides."""
    w13, w2 = torch.tensor([[1.0], [1.0]]), torch.tensor([[1.0]])
    found = gated(torch.tensor([[-9.0], [0.5], [9.0]]), w13, w2, 2.0).flatten()
    silu = torch.nn.functional.silu
    expected = torch.stack([silu(torch.tensor(-9.0)) * -2, silu(torch.tensor(0.5)) * 0.5, silu(torch.tensor(2.0)) * 2])
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "softmax", "sigmoid"])
def test_router_activations(scoring: str) -> None:
    from transformers.activations import ACT2FN

    logits = random(3, 5) * 4
    expected = logits.softmax(-1) if scoring == "softmax" else ACT2FN[scoring](logits)
    assert torch.allclose(moe.score(logits, scoring), expected)
