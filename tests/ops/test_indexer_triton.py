"""Indexer scores over keys in place: kernel against float32, packed keys, rows that see few entries or none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redknot.ops import indexer as reference
from redknot.ops.indexer import index_scores
from redknot.ops.records import V4_INDEX_FP4, V4_INDEX_FP8, Records, RowFormat, pack_
from tests.kit.kernels import DEVICE, NAN, integers, poisoned_pages, random, rotation, strided, worst

from redknot.ops import indexer_triton as kernel  # isort: skip

# float32: sums of up to 8,192 products in another order. bf16: queries, and keys whose scale is no power of two, are
# rounded to 2^-9 of themselves; the errors of 128 products and 64 heads add like a random walk.
ALLOWED = {torch.float32: 3e-6, torch.bfloat16: 1e-2}


def compare(
    q: Tensor, turned: object, keys: Tensor | Records, rows: Tensor, weights: Tensor, visible: Tensor
) -> Tensor:
    arguments = (q, turned, keys, rows, weights, visible)
    found = kernel.segment_scores(*arguments)  # type: ignore[arg-type]
    expected = reference.segment_scores(*arguments)  # type: ignore[arg-type]
    assert worst(found, expected) <= ALLOWED[q.dtype]
    return found


def keys_of(kind: str | RowFormat, width: int, used: Tensor, seed: int) -> Tensor | Records:
    """20 keys of which only ``used`` ones are set."""
    values = random(20, width, seed=seed)
    if isinstance(kind, RowFormat):
        records = poisoned_pages(kind, 5, 4)
        pack_(records, used, values[used])
        return records
    keys = torch.full((20, width), NAN, device=DEVICE)
    keys[used] = values[used]
    return strided(keys.to(getattr(torch, kind)))


@given(
    count=st.sampled_from([0, 1, 8, 9]),
    heads=st.sampled_from([1, 5, 16, 17]),
    entries=st.sampled_from([0, 1, 20, 65]),
    turns=st.booleans(),
    kind=st.sampled_from(["float32", "bfloat16", V4_INDEX_FP8, V4_INDEX_FP4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=25)
def test_any_shape(
    count: int, heads: int, entries: int, turns: bool, kind: str | RowFormat, dtype: torch.dtype, seed: int
) -> None:
    width = kind.width if isinstance(kind, RowFormat) else 24
    rows = integers(-2, 22, entries, seed=seed)
    keys = keys_of(kind, width, rows[(rows >= 0) & (rows < 20)].unique(), seed)
    q, weights = strided(random(count, heads, width, seed=seed + 1).to(dtype)), random(count, heads, seed=seed + 2)
    visible = integers(0, entries + 2, count, seed=seed + 3)
    turned = rotation(count, 4, seed) if turns else None
    compare(q, turned, keys, strided(rows), strided(weights), strided(visible))


@pytest.mark.parametrize("kind", ["bfloat16", V4_INDEX_FP8, V4_INDEX_FP4])
def test_the_geometry_of_flash(kind: str | RowFormat) -> None:
    """64 heads of 128 channels, of which 64 turn; two tiles of entries."""
    rows = torch.arange(20, device=DEVICE).repeat(4)
    keys = keys_of(kind, 128, rows[:20], 0)
    weights, visible = random(2, 64) / 90, torch.tensor([70, 1], device=DEVICE)
    for dtype in ALLOWED:
        compare(random(2, 64, 128).to(dtype), rotation(2, 32), keys, rows, weights, visible)


def test_scores_are_the_engines() -> None:
    q, keys, weights = random(3, 5, 24), random(7, 24, seed=1), random(3, 5, seed=2)
    numbers, everything = torch.arange(7, device=DEVICE), torch.full((3,), 7, device=DEVICE)
    found = kernel.segment_scores(q, None, keys, numbers, weights, everything)
    assert worst(found, index_scores(q, keys, weights)) <= ALLOWED[torch.float32]


def test_rows_that_see_nothing_and_keys_that_are_not_there() -> None:
    q, weights, visible = random(2, 3, 24), random(2, 3), torch.tensor([0, 3], device=DEVICE)
    for keys in (torch.full((4, 24), NAN, device=DEVICE), torch.empty(0, 24, device=DEVICE)):
        rows = torch.tensor([-1, 4, 2**40], device=DEVICE)
        assert bool((compare(q, None, keys, rows, weights, visible) == -float("inf")).all())
