"""The indexer: scores against the definition, and the choice of entries against a naive one, ties included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from redknot.ops.indexer import cut_margins, index_scores, keep_best, keep_lowest

NEG_INF = float("-inf")


def naive_choice(scores: list[float], topk: int) -> list[bool]:
    """Best first, equal scores by position; hidden entries never."""
    order = sorted((i for i, s in enumerate(scores) if s != NEG_INF), key=lambda i: (-scores[i], i))
    kept = set(order[:topk])
    return [i in kept for i in range(len(scores))]


# Few distinct values, so that ties are everywhere; -0.0 equals 0.0.
values = st.sampled_from([NEG_INF, -2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 1.0 + 2**-23])
tables = st.integers(2, 9).flatmap(lambda n: st.lists(st.lists(values, min_size=n, max_size=n), min_size=1, max_size=5))


def kept_of(scores: Tensor, topk: int) -> list[list[bool]]:
    """What ``keep_best`` keeps of each row, as a mask, and ``keep_lowest`` too, in order; nothing is kept twice."""
    indices, mask = keep_lowest(scores, topk)
    assert bool((indices.diff(dim=-1) > 0).all())
    kept = _as_mask(scores, topk, indices, mask)
    assert _as_mask(scores, topk, *keep_best(scores, topk)) == kept
    return kept


def _as_mask(scores: Tensor, topk: int, indices: Tensor, mask: Tensor) -> list[list[bool]]:
    assert indices.shape == mask.shape == (len(scores), topk)
    assert bool(((indices >= 0) & (indices < scores.shape[1])).all())
    assert bool(((mask == 0) | (mask == NEG_INF)).all())
    rows = []
    for picked, visible in zip(indices, mask == 0, strict=True):
        chosen = picked[visible].tolist()
        assert len(set(chosen)) == len(chosen)
        rows.append([entry in chosen for entry in range(scores.shape[1])])
    return rows


@given(tables, st.data())
def test_ties_go_to_the_lower_position(rows: list[list[float]], data: st.DataObject) -> None:
    topk = data.draw(st.integers(1, len(rows[0]) - 1))
    assert kept_of(torch.tensor(rows), topk) == [naive_choice(row, topk) for row in rows]


@given(st.integers(1, 6), st.integers(1, 300), st.integers(1, 70), st.integers(0, 1000))
def test_random_scores(rows: int, more: int, topk: int, seed: int) -> None:
    generator, entries = torch.Generator().manual_seed(seed), topk + more
    scores = torch.randn(rows, entries, generator=generator).relu_()  # half of them exactly 0
    hidden = torch.arange(entries) >= torch.randint(0, entries + 1, (rows, 1), generator=generator)
    scores.masked_fill_(hidden, NEG_INF)
    kept = kept_of(scores, topk)
    assert kept == [naive_choice(row, topk) for row in scores.tolist()]
    assert [sum(row) for row in kept] == (~hidden).sum(-1).clamp(max=topk).tolist()


def test_rows_are_chosen_alone() -> None:
    """A tie in one row changes no other row, and the scores stay as they were."""
    scores = torch.tensor([[1.0, 1.0, 1.0], [3.0, 2.0, 1.0], [NEG_INF, NEG_INF, NEG_INF]])
    before = scores.clone()
    assert kept_of(scores, 2) == [[True, True, False], [True, True, False], [False] * 3]
    assert torch.equal(scores, before)


@pytest.mark.parametrize("topk", [3, 4, 100])
def test_no_more_entries_than_topk(topk: int) -> None:
    assert cut_margins(torch.tensor([[0.0, NEG_INF, -5.0]]), topk).tolist() == [math.inf]


@given(tables, st.integers(1, 12))
def test_margins_against_sorting(rows: list[list[float]], topk: int) -> None:
    found = cut_margins(torch.tensor(rows), topk)
    assert not found.isnan().any()
    for row, margin in zip(torch.tensor(rows).tolist(), found.tolist(), strict=True):
        ordered = sorted(row, reverse=True)
        dropped = topk < len(row) and ordered[topk] != NEG_INF
        assert margin == pytest.approx(ordered[topk - 1] - ordered[topk] if dropped else math.inf, rel=1e-6)


@given(st.integers(1, 5), st.sampled_from([0, 1, 7, 40_000]), st.integers(0, 1000))
def test_scores_against_the_definition(rows: int, entries: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, 4, 8, generator=generator)
    keys, weights = torch.randn(entries, 8, generator=generator), torch.randn(rows, 4, generator=generator)
    found = index_scores(q, keys, weights)
    expected = (torch.einsum("thd,nd->thn", q.double(), keys.double()).relu() * weights.double().unsqueeze(-1)).sum(1)
    assert found.shape == (rows, entries)
    assert entries == 0 or (found - expected).abs().max() <= 1e-5
