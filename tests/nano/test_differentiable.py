"""The trainer's forward equals the engine's, and every parameter it trains gets a finite gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from redknot.model.weights import ModelWeights
from redknot.nano.differentiable import forward
from redknot.runtime.counters import Counters
from tests.kit.alter import mapped, with_geometry
from tests.kit.oracle import Oracle, tokens
from tests.kit.rows import every_row, widest

# Never trained by the language loss: tables, and the router bias, which only chooses.
UNTRAINED = ("tid2eid", "moe.bias")


@pytest.fixture(params=["small", "wide"])
def oracle(request: pytest.FixtureRequest) -> Oracle:
    made: Oracle = request.getfixturevalue(request.param)
    return made


def lengths(oracle: Oracle) -> list[int]:
    return [windows * oracle.geometry.window for windows in ((1, 2, 6) if oracle.geometry.window < 64 else (1, 2))]


def clear_cuts(oracle: Oracle, ids: Tensor) -> Tensor:
    """The engine's logits of every row, after a look at its cuts: a near tie may fall either way."""
    counters = Counters(cuts=[])
    found = every_row(oracle.model, ids, counters=counters)
    assert counters.cuts is not None
    assert all(bool((margins > 1e-6).all()) for _, margins in counters.cuts), "take other tokens"
    return found


@pytest.mark.parametrize("choosing", [True, False], ids=["topk", "all-entries"])
def test_equals_the_engine(oracle: Oracle, choosing: bool) -> None:
    geometry = oracle.geometry
    for length in lengths(oracle):
        ids = torch.stack([tokens(length), tokens(length + 1)[:length]])
        if choosing:
            expected = torch.cat([clear_cuts(oracle, row) for row in ids])
        else:
            everything = with_geometry(oracle.model, index_topk=10_000)
            expected = torch.cat([every_row(everything, row) for row in ids])
        with torch.inference_mode():
            found, traces = forward(oracle.model.weights, geometry, ids, topk=geometry.index_topk if choosing else None)
        assert widest(found, expected) <= 1e-4, length
        assert traces == []


def test_some_rows_only(small: Oracle) -> None:
    ids = torch.stack([tokens(64), tokens(65)[:64]])
    rows = torch.tensor([3, 63, 64, 127])
    with torch.inference_mode():
        whole, _ = forward(small.model.weights, small.geometry, ids)
        some, _ = forward(small.model.weights, small.geometry, ids, rows=rows)
    assert widest(some, whole[rows]) <= 1e-6


def trainable(oracle: Oracle) -> tuple[ModelWeights, dict[str, Tensor]]:
    leaves: dict[str, Tensor] = {}

    def leaf(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaves[name] = tensor.detach().clone().requires_grad_()
        return leaves[name]

    return mapped(oracle.model.weights, leaf), leaves


def test_gradients_of_the_language_loss(oracle: Oracle) -> None:
    """Finite everywhere, and there for all that it trains; the indexer's choice has none."""
    weights, leaves = trainable(oracle)
    ids = tokens(2 * oracle.geometry.window).unsqueeze(0)
    logits, _ = forward(weights, oracle.geometry, ids, topk=oracle.geometry.index_topk)
    cross_entropy(logits[:-1], ids[0, 1:]).backward()
    for name, leaf in leaves.items():
        if name.endswith(UNTRAINED) or ".indexer." in name:
            assert leaf.grad is None or not leaf.grad.any(), name
        else:
            assert leaf.grad is not None, name
            assert leaf.grad.isfinite().all(), name
            assert leaf.grad.any(), name


def test_gradients_of_distillation(small: Oracle) -> None:
    """The indexer's scores learn from the attention they stand for; nothing else is pulled along."""
    weights, leaves = trainable(small)
    ids = torch.stack([tokens(128), tokens(129)[:128]])
    _, traces = forward(weights, small.geometry, ids, trace=True)
    assert len(traces) == sum(str(kind).startswith("compressed") for kind in small.geometry.kinds)
    loss = torch.zeros(())
    for trace in traces:
        assert trace.scores.shape == trace.attention.shape == (2, 128, 32)
        assert not trace.attention.requires_grad
        assert bool((trace.attention[:, ~trace.visible] == 0).all())
        assert torch.isneginf(trace.scores[:, ~trace.visible]).all()
        rows = trace.visible.any(-1)
        target = trace.attention[:, rows] / trace.attention[:, rows].sum(-1, keepdim=True)
        mine = trace.scores[:, rows].log_softmax(-1).masked_fill(~trace.visible[rows], 0.0)
        loss = loss + kl_div(mine, target, reduction="batchmean")
    assert loss.isfinite()
    loss.backward()
    for name, leaf in leaves.items():
        if ".indexer." in name:
            assert leaf.grad is not None, name
            assert leaf.grad.any(), name
        assert leaf.grad is None or leaf.grad.isfinite().all(), name
