"""Measuring the drift of heads: zero where nothing changes, by hand on a tiny layer, and the choice that follows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from redknot.artifact.identity import ModelIdentity, token_hash
from redknot.build.contents import Content
from redknot.build.heads import (
    HeadSums,
    choose,
    contexts,
    corpus_digest,
    measure,
    measure_corpus,
    measured_heads,
    remaining,
    squared_norms,
)
from redknot.model.heads import HeadCorpus, fixed_table
from redknot.runtime.model import Model
from tests.kit.alter import with_tensors
from tests.kit.tiny import tiny_model


def content(length: int, seed: int = 0) -> Content:
    ids = np.random.default_rng([seed, length]).integers(8, 2048, length).astype(np.int32)
    return Content((f"d{seed}",), "", ids, token_hash(ids))


def ids_of(length: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(content(length, seed).token_ids).long()


def drifts(model: Model, before: list[Tensor], document: Tensor) -> Tensor:
    sums = HeadSums.of(model.geometry)
    measure(model, before, document, sums)
    assert sums.rows == len(document)
    return sums.drifts


def test_nothing_drifts_without_anything_in_front(model: Model) -> None:
    found = drifts(model, [], ids_of(150))
    assert found.shape == (model.geometry.num_layers, 2, 8)
    assert not found.any()


def test_everything_drifts_behind_another_document(model: Model) -> None:
    found = drifts(model, [ids_of(1, 5), ids_of(100, 1)], ids_of(150))
    assert found.isfinite().all()
    assert (found > 1e-3).all()
    # Layer 0 slides: only rows within the window of the first token see what is in front.
    assert found[0].mean() < found[1:].mean()


def test_a_head_that_the_projection_does_not_read_does_not_drift(model: Model) -> None:
    def silence(wo_a: Tensor) -> Tensor:
        wo_a.unflatten(-1, (8, -1))[1, :, 3] = 0
        return wo_a

    found = drifts(with_tensors(model, "2.attn.wo_a", silence), [ids_of(90, 1)], ids_of(60))
    assert found[2, 1, 3] == 0
    assert (found[2].flatten() > 0).sum() == 15


def test_by_hand() -> None:
    """Two groups of two heads, one channel a head, rank one, hidden size one: a drift is one division."""
    model = tiny_model("one")
    attn = model.weights.layers[0].attn
    wo_a, wo_b = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), torch.tensor([[1.0, 10.0]])
    layer = replace(model.weights.layers[0], attn=replace(attn, wo_a=wo_a, wo_b=wo_b))
    model = Model(model.geometry, replace(model.weights, layers=(layer,)))
    outputs = torch.tensor([[[[1.0], [2.0]], [[3.0], [4.0]]], [[[0.0], [1.0]], [[0.0], [0.0]]]])  # [2 rows, G, 2, 1]
    alone = torch.tensor([[[[1.0], [1.0]], [[3.0], [4.5]]], [[[2.0], [1.0]], [[0.0], [0.0]]]])
    errors, whole = squared_norms(model, 0, outputs - alone, outputs)
    # Head (0, 0): 2 in row 1, times 1. Head (0, 1): 1, times 2. Head (1, 1): 0.5, times 4, times 10.
    assert errors.tolist() == [[4.0, 4.0], [0.0, 400.0]]
    # Row 0: 1 * 1 + 2 * 2 + 10 * (3 * 3 + 4 * 4) = 255; row 1: 2.
    assert whole.item() == 255.0**2 + 4
    sums = HeadSums(errors.unsqueeze(0), whole.unsqueeze(0), 2)
    assert sums.drifts[0, 1, 1].item() == pytest.approx(20 / (255.0**2 + 4) ** 0.5)
    # The same as the relative error of the head, times its share of the output.
    own = torch.tensor(160.0)  # 10 * 4 * 4 in row 0
    assert sums.drifts[0, 1, 1].item() == pytest.approx(float(20 / own * (own / whole.sqrt())))


def test_rows_of_several_documents_are_pooled(model: Model) -> None:
    both, one, other = (HeadSums.of(model.geometry) for _ in range(3))
    front, first, second = [ids_of(70, 1)], ids_of(40, 2), ids_of(130, 3)
    measure(model, front, first, both)
    measure(model, front, second, both)
    measure(model, front, first, one)
    measure(model, front, second, other)
    assert both.rows == 170
    torch.testing.assert_close(both.errors, one.errors + other.errors)
    expected = ((one.errors + other.errors) / (one.outputs + other.outputs)[:, None, None]).sqrt()
    torch.testing.assert_close(both.drifts, expected)


def test_nothing_measured_is_no_drift(model: Model) -> None:
    assert not HeadSums.of(model.geometry).drifts.any()


@given(st.integers(0, 2**20), st.integers(1, 7))
def test_the_choice_leaves_least(seed: int, count: int) -> None:
    found = torch.rand(3, 2, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    table = choose(found, count)
    assert table.per_group == count
    for layer, groups in enumerate(table.positions):
        for group, chosen in enumerate(groups):
            local = [head for head in range(8) if head not in chosen]
            assert found[layer, group, list(chosen)].min() >= found[layer, group, local].max()
    left = remaining(found, table)
    fixed = table.model_copy(update={"positions": ((tuple(range(count)),) * 2,) * 3})
    assert left <= remaining(found, fixed)
    assert left == pytest.approx(float(found.sort(-1).values[..., : 8 - count].mean()))


def test_of_equal_heads_the_first_is_chosen() -> None:
    assert choose(torch.zeros(2, 2, 8), 2).positions == (((0, 1), (0, 1)),) * 2


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 100), st.integers(1, 120))
def test_contexts(lengths: list[int], tokens: int, most: int) -> None:
    contents = [content(length, number) for number, length in enumerate(lengths)]
    found = contexts(contents, tokens, most, seed=3)
    assert found == contexts(contents, tokens, most, seed=3)
    for number, others in enumerate(found):
        count = sum(lengths[other] for other in others)
        assert number not in others
        assert len(set(others)) == len(others)
        assert not others or count + lengths[number] <= most
        assert sum(lengths[other] for other in others[:-1]) < tokens
        if count < tokens:  # then nothing else fits
            left = [length for other, length in enumerate(lengths) if other not in (*others, number)]
            assert all(count + lengths[number] + length > most for length in left)


def test_a_corpus_is_measured_document_by_document(model: Model) -> None:
    contents, done = [content(50, 0), content(80, 1), content(40, 2)], []
    found = measure_corpus(model, contents, [(1, 2), ()], done.append)
    assert done == contents[:2]
    assert found.rows == 50  # a document without another one in front is not measured
    bos = torch.tensor([model.geometry.bos_token_id])
    expected = HeadSums.of(model.geometry)
    measure(model, [bos, ids_of(80, 1), ids_of(40, 2)], ids_of(50), expected)
    torch.testing.assert_close(found.errors, expected.errors)
    corpus = HeadCorpus(digest=corpus_digest(contents), documents=3, tokens=170, measured=1, rows=50, context=9, seed=0)
    identity = ModelIdentity.of(weights_hash="w", geometry={}, dtype="float32", tokenizer_hash="t", prompt_encoder="p")
    made = measured_heads(model, identity, found, corpus, 2)
    assert made.table == choose(found.drifts, 2)
    assert made.model.weights_hash == "w"
    assert made.remaining.table == remaining(found.drifts, made.table)
    assert made.remaining.fixed == remaining(found.drifts, fixed_table(model.geometry, (0, 1)))
    assert made.remaining.table <= made.remaining.fixed


def test_a_corpus_has_one_digest_in_any_order() -> None:
    contents = [content(20, number) for number in range(3)]
    assert corpus_digest(contents) == corpus_digest(contents[::-1]) != corpus_digest(contents[:2])
