"""Attention over latents in place: kernel against float32, turned queries against turned keys, hostile memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redknot.ops import segment as reference
from redknot.ops.attention import Partial
from redknot.ops.records import V4_RECORD, Quantised, Records, RowFormat, pack_
from redknot.ops.rope import rotate
from tests.kit.kernels import DEVICE, NAN, integers, poisoned_pages, random, rotation, strided, worst

from redknot.ops import segment_triton as kernel  # isort: skip

INF = float("inf")
SMALL = RowFormat(Quantised.FP8, values=16, tile=16, fp32_scales=False, rope=8)
# float32: sums of up to 600 products in another order. bf16: queries and weights are rounded to 2^-9 of themselves, and
# a logit of 4 that is off by 2^-9 of itself moves a weight by 1 %.
ALLOWED = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


def compare(q: Tensor, turned: object, keys: Tensor | Records, indices: Tensor) -> Partial:
    found = kernel.segment_attention(q, turned, keys, indices)  # type: ignore[arg-type]
    expected = reference.segment_attention(q, turned, keys, indices)  # type: ignore[arg-type]
    assert worst(found.output, expected.output) <= ALLOWED[q.dtype]
    assert worst(found.lse, expected.lse) <= ALLOWED[q.dtype]
    return found


def plain(rows: int, width: int, used: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Latents at odd strides, NaN wherever no index points."""
    keys = torch.full((rows, width), NAN, device=DEVICE)
    keys[used] = random(rows, width, seed=seed)[used]
    return strided(keys.to(dtype))


def packed(rows: int, layout: RowFormat, used: Tensor, seed: int) -> Records:
    records = poisoned_pages(layout, 4, -(-rows // 4))
    pack_(records, used, random(rows, layout.width, seed=seed)[used])
    return records


def hostile(rows: int, count: int, held: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices [rows, count] with repeats, -1 and numbers outside; and those that exist."""
    indices = integers(-1, held, rows, count, seed=seed)
    indices[integers(0, 5, rows, count, seed=seed + 1) == 0] = held
    indices[integers(0, 9, rows, count, seed=seed + 2) == 0] = 2**40
    indices[integers(0, 9, rows, count, seed=seed + 3) == 0] = -(2**40)
    return strided(indices), indices[(indices >= 0) & (indices < held)].unique()


@given(
    rows=st.integers(0, 3),
    heads=st.sampled_from([1, 3, 16, 17, 20]),
    count=st.sampled_from([0, 1, 2, 31, 33, 70]),
    turns=st.booleans(),
    kind=st.sampled_from(["packed", torch.float32, torch.bfloat16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=25)
def test_any_shape(
    rows: int, heads: int, count: int, turns: bool, kind: str | torch.dtype, dtype: torch.dtype, seed: int
) -> None:
    held = 12
    indices, used = hostile(rows, count, held, seed)
    keys = plain(held, 24, used, kind, seed) if isinstance(kind, torch.dtype) else packed(held, SMALL, used, seed)
    q = strided(random(rows, heads, 24, seed=seed + 4).to(dtype)) * 24**-0.5
    compare(q, rotation(rows, 4, seed) if turns else None, keys, indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [packed, plain])
def test_the_geometry_of_flash(make: Callable[..., Tensor | Records], dtype: torch.dtype) -> None:
    """64 heads, 512 channels of which 64 turn, two tiles of entries."""
    indices, used = hostile(2, 40, 52, 0)
    keys = packed(52, V4_RECORD, used, 1) if make is packed else plain(52, 512, used, torch.bfloat16, 1)
    compare(random(2, 64, 512).to(dtype) * 512**-0.5 * 3, rotation(2, 32), keys, indices)


@pytest.mark.parametrize("outside", [[-1, -1, -1], [12, 99, -7], []])
def test_a_row_that_sees_nothing(outside: list[int]) -> None:
    indices = torch.tensor([outside, outside], dtype=torch.int64, device=DEVICE).view(2, -1)
    keys = torch.full((12, 24), NAN, device=DEVICE)
    for some in (keys, keys[:0], poisoned_pages(SMALL, 4, 3), poisoned_pages(SMALL, 4, 0)):
        found = compare(random(2, 3, 24), rotation(2, 4), some, indices)
        assert not found.output.any()
        assert bool((found.lse == -INF).all())


def test_large_logits_do_not_overflow() -> None:
    q, keys = random(2, 3, 24) * 200, random(70, 24, seed=1) * 5
    indices = integers(0, 70, 2, 70)
    found = kernel.segment_attention(q, None, keys, indices)
    assert worst(found.output, reference.segment_attention(q, None, keys, indices).output) <= 1e-3


def test_turning_queries_is_turning_keys() -> None:
    """<R_{t-D} q, R_j c> = <R_t q, R_{D+j} c>: what the CPU engine does with a copy of the keys."""
    q, content = random(3, 2, 24), random(9, 24, seed=1)
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001])
    rows, entries, offset = torch.tensor([20, 21, 40]), torch.arange(9), 11

    def at(positions: Tensor) -> object:
        from redknot.ops.rope import Rotation, rotation_at

        turned = rotation_at(positions, frequencies)
        return Rotation(turned.cos.to(DEVICE), turned.sin.to(DEVICE))

    indices = entries.expand(3, 9).to(DEVICE)
    stored, moved = (rotate(content, at(entries + by)) for by in (0, offset))  # type: ignore[arg-type]
    found = kernel.segment_attention(q, at(rows - offset), stored, indices)  # type: ignore[arg-type]
    expected = reference.segment_attention(q, at(rows), moved, indices)  # type: ignore[arg-type]
    assert worst(found.lse, expected.lse) <= 1e-5
    # Outputs differ by the frame that both leave at the end: here neither, so they are equal as they are.
    assert worst(found.output, expected.output) <= 1e-5
