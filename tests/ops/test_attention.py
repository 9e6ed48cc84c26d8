"""Attention in parts: any split, any order, empty sides, sinks once; hostile values in what nobody may see."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from redknot.ops import attention
from redknot.ops.attention import Partial, apply_sink_, attend, attend_chosen, merge_

INF = float("inf")
HEADS, D = 3, 8


def merge(parts: list[Partial]) -> Partial:
    into = Partial(parts[0].output.clone(), parts[0].lse.clone())
    for part in parts[1:]:
        merge_(into, part)
    return into


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(q: Tensor, keys: Tensor, seen: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax attention in float64 with each head's sink as one more logit: [T, H, d] x [K, d] -> [T, H, d]."""
    logits = torch.einsum("thd,kd->thk", q.double(), keys.double()).masked_fill(~seen.unsqueeze(1), -INF)
    if sinks is None:
        return torch.softmax(logits, -1).nan_to_num() @ keys.double()
    extra = sinks.double().view(1, -1, 1).expand(*logits.shape[:2], 1)
    return torch.softmax(torch.cat((logits, extra), -1), -1)[..., :-1].nan_to_num() @ keys.double()


def partial(q: Tensor, keys: Tensor, seen: Tensor) -> Partial:
    """One part, all rows against the same keys."""
    mask = torch.zeros(seen.shape).masked_fill_(~seen, -INF)
    return attend(q.unsqueeze(0), keys.unsqueeze(0), mask.unsqueeze(0))


@given(st.integers(1, 5), st.lists(st.integers(0, 7), min_size=1, max_size=4), st.integers(0, 10**6), st.booleans())
def test_any_split_in_any_order_equals_the_whole(rows: int, sizes: list[int], seed: int, strong: bool) -> None:
    """Parts of any size, also empty ones and ones of which a row sees nothing."""
    total = sum(sizes)
    q, keys = random(rows, HEADS, D, seed=seed) * (8 if strong else 1), random(total, D, seed=seed + 1)
    seen = torch.rand(rows, total, generator=torch.Generator().manual_seed(seed)) < 0.6
    parts, at = [], 0
    for size in sizes:
        if size:
            parts.append(partial(q, keys[at : at + size], seen[:, at : at + size]))
        else:
            parts.append(Partial(torch.zeros(rows, HEADS, D), torch.full((rows, HEADS), -INF)))
        at += size
    expected = whole(q, keys, seen)
    lse = torch.einsum("thd,kd->thk", q.double(), keys.double()).masked_fill(~seen.unsqueeze(1), -INF).logsumexp(-1)
    first: Tensor | None = None
    for order in itertools.permutations(range(len(parts))):
        copies = [Partial(parts[i].output.clone(), parts[i].lse.clone()) for i in order]
        found = merge(copies)
        assert not found.output.isnan().any()
        # A log-sum-exp of 40 is good to 2e-6 in float32, and so are the shares taken from it.
        assert (found.output - expected).abs().max() <= (1e-5 if strong else 2e-6)
        assert torch.equal(found.lse.isinf(), lse.isinf())
        assert (found.lse - lse).nan_to_num(nan=0.0).abs().max() <= 1e-5
        first = found.output if first is None else first
        assert (found.output - first).abs().max() <= 1e-6


def test_merging_again_changes_nothing() -> None:
    """Associative: merging merged parts equals merging all at once."""
    q, keys = random(4, HEADS, D), random(9, D, seed=1)
    seen = torch.ones(4, 9, dtype=torch.bool)
    a, b, c = (partial(q, keys[s], seen[:, s]) for s in (slice(0, 2), slice(2, 7), slice(7, 9)))
    left = merge([merge([a, b]), c])
    right = merge([a, merge([b, c])])
    assert (left.output - right.output).abs().max() <= 1e-6
    assert (left.lse - right.lse).abs().max() <= 1e-6


def test_a_row_without_keys() -> None:
    found = partial(random(2, HEADS, D), random(3, D), torch.zeros(2, 3, dtype=torch.bool))
    assert torch.equal(found.output, torch.zeros(2, HEADS, D))
    assert bool((found.lse == -INF).all())
    both = merge([found, Partial(found.output.clone(), found.lse.clone())])
    assert torch.equal(both.output, torch.zeros(2, HEADS, D))
    assert bool((both.lse == -INF).all())


def test_large_logits_do_not_overflow() -> None:
    q, keys = random(2, HEADS, D) * 200, random(5, D, seed=1) * 5
    seen = torch.ones(2, 5, dtype=torch.bool)
    found = merge([partial(q, keys[:2], seen[:, :2]), partial(q, keys[2:], seen[:, 2:])])
    assert (found.output - whole(q, keys, seen)).abs().max() <= 1e-4


@pytest.mark.parametrize("sink", [0.0, -3.0, 40.0, -INF, INF])
@pytest.mark.parametrize("cut", [0, 1, 4, 6])
def test_the_sink_enters_once_however_many_parts(sink: float, cut: int) -> None:
    q, keys = random(4, HEADS, D), random(6, D, seed=1)
    seen = torch.ones(4, 6, dtype=torch.bool).tril(2)
    sinks = torch.tensor([sink, 0.5, sink])
    parts = [partial(q, keys[s], seen[:, s]) for s in (slice(0, cut), slice(cut, 6)) if s.start < s.stop]
    found = apply_sink_(merge(parts), sinks)
    expected = whole(q, keys, seen, sinks)
    if sink == INF:
        expected[:, [0, 2]] = 0
    assert (found - expected).abs().max() <= 2e-6


@pytest.mark.parametrize("sink", [0.0, -INF, INF])
def test_a_row_without_keys_is_zero_whatever_the_sink(sink: float) -> None:
    empty = Partial(torch.zeros(2, HEADS, D), torch.full((2, HEADS), -INF))
    assert torch.equal(apply_sink_(empty, torch.full((HEADS,), sink)), torch.zeros(2, HEADS, D))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.integers(0, 1000))
def test_groups_read_their_own_keys(n: int, m: int, k: int, seed: int) -> None:
    q, keys = random(n, m, HEADS, D, seed=seed), random(n, k, D, seed=seed + 1)
    seen = torch.rand(n, m, k, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask = torch.zeros(seen.shape).masked_fill_(~seen, -INF)
    found = attend(q, keys, mask)
    expected = torch.cat([whole(q[i], keys[i], seen[i]) for i in range(n)])
    assert (found.output - expected).abs().max() <= 2e-6
    every = attend(q, keys, None)
    expected = torch.cat([whole(q[i], keys[i], torch.ones(m, k, dtype=torch.bool)) for i in range(n)])
    assert (every.output - expected).abs().max() <= 2e-6


@given(st.integers(0, 6), st.integers(1, 5), st.sampled_from([1, 40, 10**6]), st.integers(0, 1000))
def test_rows_read_the_keys_they_chose(rows: int, k: int, most: int, seed: int) -> None:
    """However few keys are gathered at a time; a hidden choice counts nothing."""
    generator = torch.Generator().manual_seed(seed)
    q, keys = random(rows, HEADS, D, seed=seed), random(7, D, seed=seed + 1)
    indices = torch.rand(rows, 7, generator=generator).argsort(-1)[:, :k]
    hidden = torch.rand(rows, k, generator=generator) < 0.3
    mask = torch.zeros(rows, k).masked_fill_(hidden, -INF)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MOST_GATHERED", most)
        found = attend_chosen(q, keys, indices, mask)
    seen = torch.zeros(rows, 7, dtype=torch.bool).scatter_(1, indices, ~hidden)
    assert found.output.shape == (rows, HEADS, D)
    assert rows == 0 or (found.output - whole(q, keys, seen)).abs().max() <= 2e-6
    assert torch.equal(found.lse.isinf(), ~seen.any(-1).unsqueeze(-1).expand(rows, HEADS))


def test_strided_inputs() -> None:
    """Views with odd strides give what contiguous tensors give."""
    q, keys = random(2, 3, D, HEADS).transpose(2, 3), random(2, D, 5, seed=1).transpose(1, 2)
    found, expected = attend(q, keys, None), attend(q.contiguous(), keys.contiguous(), None)
    assert torch.equal(found.output, expected.output)
