"""Grouped projection of picked heads into picked rows: kernel against float32, rows replaced once, others kept."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redknot.ops import projection as reference
from tests.kit.kernels import DEVICE, NAN, integers, random, strided, worst

from redknot.ops import projection_triton as kernel  # isort: skip

# float32: sums of up to 4,096 products in another order. bf16: both take the same rounded inputs, whose products are
# exact in float32.
ALLOWED = 5e-6


def compare(z: Tensor, *rest: Tensor | None) -> Tensor:
    found, expected = (strided(z) for _ in range(2))
    kernel.project_rows_(found, *rest)  # type: ignore[arg-type]
    reference.project_rows_(expected, *rest)  # type: ignore[arg-type]
    untouched = expected.isnan()
    assert torch.equal(found.isnan(), untouched)
    assert worst(found.masked_fill(untouched, 0.0), expected.masked_fill(untouched, 0.0)) <= ALLOWED
    return found


@given(
    count=st.sampled_from([0, 1, 3, 16, 17]),
    groups=st.integers(1, 3),
    heads=st.integers(1, 3),
    d=st.sampled_from([8, 24]),
    rank=st.sampled_from([1, 16, 20]),
    picked=st.booleans(),
    restores=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=25)
def test_any_shape(
    count: int,
    groups: int,
    heads: int,
    d: int,
    rank: int,
    picked: bool,
    restores: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Rows hold NaN before: what is replaced keeps nothing, what is not named keeps what it had."""
    z = torch.full((count + 4, groups, rank), NAN, device=DEVICE)
    output = strided(random(count, groups, heads, d, seed=seed).to(dtype))
    wo_a = strided(random(groups, heads * d, rank, seed=seed + 1).to(dtype))
    rows = torch.randperm(count + 4, generator=torch.Generator().manual_seed(seed))[:count].to(DEVICE)
    outside = integers(0, 4, count, seed=seed) == 0
    rows = torch.where(outside, torch.tensor([-1, count + 4, 2**40, -(2**40)] * 5)[:count].to(DEVICE), rows)
    if picked:  # what is skipped may be unset memory
        output[outside] = NAN
    restored = strided(random(count, groups * rank, seed=seed + 2)) if restores else None
    compare(z, output, wo_a, strided(rows) if picked else None, restored)


def test_a_head_split_in_two_calls_is_every_row_once() -> None:
    """As the forward does: whole rows with all heads, restored rows with Global heads and Z_L; 0 heads' worth twice."""
    groups, d, rank = 2, 16, 16
    output, wo_a = random(5, groups, 4, d), random(groups, 4 * d, rank, seed=1)
    whole, split, global_heads, local_heads = torch.tensor([0, 3, 4]), torch.tensor([1, 2]), [0, 2], [1, 3]
    per_head = wo_a.view(groups, 4, d, rank)
    local = torch.einsum("tghd,ghdr->tgr", output[split][:, :, local_heads], per_head[:, local_heads]).flatten(1)
    z = torch.full((5, groups, rank), NAN, device=DEVICE)
    kernel.project_rows_(z, output[whole], wo_a, whole.to(DEVICE))
    picked = per_head[:, global_heads].flatten(1, 2)
    kernel.project_rows_(z, output[split][:, :, global_heads], picked, split.to(DEVICE), local)
    assert worst(z, torch.einsum("tghd,ghdr->tgr", output, per_head)) <= ALLOWED
    again = z.clone()
    kernel.project_rows_(z, output[split][:, :, global_heads], picked, split.to(DEVICE), local)
    assert torch.equal(z, again)


def test_a_depth_of_many_tiles() -> None:
    """A group of Flash: eight heads of 512 channels (the rank is cut: it only adds programs)."""
    compare(torch.zeros(2, 1, 32, device=DEVICE), random(2, 1, 8, 512).bfloat16(), random(1, 4096, 32).bfloat16())
