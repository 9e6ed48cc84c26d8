"""Experts of kept pairs: kernels against float32, dropped pairs that are not read, ranks, experts without rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redknot.model.weights import MoeWeights
from redknot.ops import moe as reference
from redknot.ops.moe import FanOut, Routing, fan_out_mask
from tests.kit.kernels import DEVICE, NAN, integers, random, strided, worst

from redknot.ops import moe_triton as kernel  # isort: skip

LIMIT = 1.0
# float32: sums of up to 160 products in another order, twice. bf16: inputs are the same rounded ones, and what is
# between the two products is rounded to bf16 once more.
ALLOWED = {torch.float32: 5e-6, torch.bfloat16: 1e-2}


def experts(count: int, hidden: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> MoeWeights:
    def weight(*shape: int, seed: int) -> Tensor:
        return strided((random(*shape, seed=seed) * shape[-1] ** -0.5).to(dtype))

    return MoeWeights(
        gate=torch.empty(0),
        bias=None,
        tid2eid=None,
        w13=weight(count, 2 * width, hidden, seed=seed),
        w2=weight(count, hidden, width, seed=seed + 1),
        first_expert=0,
        shared_w13=weight(8, hidden, seed=seed + 2),
        shared_w2=weight(hidden, 4, seed=seed + 3),
    )


def routing(rows: int, count: int, k: int, seed: int, pruned: bool) -> Routing:
    """Distinct experts a row, the last one of all never chosen; dropped pairs have the weight NaN."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(rows, max(count - 1, k), generator=generator).argsort(-1)[:, :k].to(DEVICE)
    shares = torch.rand(rows, k, generator=generator).to(DEVICE) + 0.01
    if not pruned:
        return Routing(chosen, shares, None)
    kept = fan_out_mask(shares, FanOut(1, 0.5))
    return Routing(chosen, torch.where(kept, shares, NAN), kept)


def compare(weights: MoeWeights, x: Tensor, routed: Routing) -> Tensor:
    found, ran = kernel.experts_forward(weights, x, routed, LIMIT)
    whole = {name: value.float() for name, value in vars(weights).items() if isinstance(value, Tensor)}
    expected, ran_there = reference.experts_forward(replace(weights, **whole), x.float(), routed, LIMIT)
    assert ran == ran_there
    assert found.dtype == x.dtype
    assert worst(found, expected) <= ALLOWED[x.dtype]
    return found


@given(
    rows=st.sampled_from([0, 1, 2, 9]),
    count=st.sampled_from([1, 3, 5]),
    hidden=st.sampled_from([8, 24]),
    width=st.sampled_from([1, 16, 20]),
    pruned=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=20)
def test_any_shape(rows: int, count: int, hidden: int, width: int, pruned: bool, dtype: torch.dtype, seed: int) -> None:
    x = strided(random(rows, hidden, seed=seed).to(dtype))
    compare(experts(count, hidden, width, seed, dtype), x, routing(rows, count, min(count, 3), seed, pruned))


@pytest.mark.parametrize("dtype", list(ALLOWED))
def test_tiles_of_many_pairs(dtype: torch.dtype) -> None:
    """One expert with more rows than a tile has, one with none, and depths of more than a tile."""
    weights, x = experts(3, 160, 70, 0, dtype), random(70, 160).to(dtype)
    chosen = torch.zeros(70, 1, dtype=torch.int64, device=DEVICE)
    chosen[5:9] = 2
    compare(weights, x, Routing(chosen, torch.rand(70, 1, device=DEVICE), None))


def test_dropped_pairs_are_not_there() -> None:
    """They have no slot; an expert whose every pair is dropped may hold NaN, and so may their rows' weights."""
    weights, x = experts(4, 24, 16, 0), random(6, 24)
    chosen = torch.tensor([0, 1, 3], device=DEVICE).expand(6, 3)
    kept = integers(0, 2, 6, 3, seed=1).bool()
    kept[:, 1] = False
    weights.w13[1:3], weights.w2[1:3] = NAN, NAN
    routed = Routing(chosen, torch.where(kept, 0.5, NAN), kept)
    laid_out = kernel.dispatch(routed, 0, 4)
    assert int(laid_out.pairs) == int(kept.sum())
    assert torch.equal(laid_out.slots >= 0, kept)
    slots = laid_out.slots[kept]
    assert torch.equal(slots.sort().values.cpu(), torch.arange(len(slots)))
    assert torch.equal(laid_out.rows[slots], kept.nonzero()[:, 0])
    assert not compare(weights, x, routed).isnan().any()


def test_no_pair_at_all() -> None:
    weights, x = experts(2, 24, 16, 0), random(3, 24)
    weights.w13[:], weights.w2[:] = NAN, NAN
    chosen = torch.tensor([[0, 1]], device=DEVICE).expand(3, 2)
    compare(weights, x, Routing(chosen, torch.full((3, 2), NAN), torch.zeros(3, 2, dtype=torch.bool, device=DEVICE)))


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_sum_to_the_whole(world: int) -> None:
    weights, x, routed = experts(4, 24, 16, 0), random(7, 24), routing(7, 5, 3, 0, True)
    part, total = 4 // world, torch.zeros(7, 24, device=DEVICE)
    shared = reference.gated(x, weights.shared_w13, weights.shared_w2, LIMIT)
    for first in range(0, 4, part):
        mine = slice(first, first + part)
        rank = replace(weights, w13=weights.w13[mine], w2=weights.w2[mine], first_expert=first)
        total += compare(rank, x, routed) - shared
    assert worst(total + shared, reference.experts_forward(weights, x, routed, LIMIT)[0]) <= 2e-5


def test_sums_are_the_same_every_time() -> None:
    weights, x, routed = experts(4, 24, 16, 0), random(7, 24), routing(7, 5, 3, 0, True)
    first, second = (kernel.experts_forward(weights, x, routed, LIMIT)[0] for _ in range(2))
    assert torch.equal(first, second)
