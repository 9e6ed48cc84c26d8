"""The indexer ranking against its definition: rows x CSA layers, one dot product per head and entry."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from redknot.build.capture import evaluate
from redknot.latents.segment import Segment
from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace
from redknot.model.geometry import LayerKind
from redknot.ops.hyper import enter
from redknot.ops.norm import rms_norm
from redknot.ops.rope import rotate, rotation_at
from redknot.runtime.capture import Capture
from redknot.runtime.counters import Counters
from redknot.runtime.forward import Stage, forward
from redknot.runtime.layout import RowSet
from redknot.runtime.model import Model
from redknot.runtime.ranking import rank_by_indexer
from tests.kit.requests import Memory, Piece, document, known, new, restored
from tests.kit.tiny import tiny_model
from tests.runtime.conftest import Served

NEEDS = ("latents", "streams:1", "window_all")


def csa_layers(model: Model) -> list[int]:
    return [layer for layer, kind in enumerate(model.geometry.kinds) if kind is LayerKind.CSA]


def streams_into(
    model: Model, space: LatentSpace, segments: Sequence[Segment], first: int, ids: Tensor, layer: int
) -> Tensor:
    """Residual streams of the request's rows from ``first`` on where they enter a layer: [t, hc, hidden]."""
    own = Segment(first, 0, len(ids) - first, closed=False)
    capture, nobody = Capture(stream_layer=layer), torch.empty(0, dtype=torch.int64)
    with Workspace(space) as memory:
        memory.allocate(own, own.length)
        rows = RowSet(model.geometry, (memory.session([*segments, own]),), (torch.arange(first, len(ids)),))
        forward(model, [Stage(range(layer + 1), rows, ids[first:], go_on=nobody)], Counters(), capture)
    return capture.streams[0]


@torch.inference_mode()
def naive_scores(
    model: Model, space: LatentSpace, segments: Sequence[Segment], first: int, ids: Tensor, layer: int
) -> Tensor:
    """Votes of one CSA layer for each group of the known segments, whose entries all these rows see: [groups]."""
    g, layer_weights = model.geometry, model.weights.layers[layer]
    w, frequencies = layer_weights.attn, model.frequencies[g.rope(layer)]
    assert w.indexer is not None
    x, _ = enter(layer_weights.attn_hc, streams_into(model, space, segments, first, ids, layer), g)
    *_, q_a, head_weights = linear(rms_norm(x, layer_weights.attn_norm, g.norm_eps), w.w_in).split(w.in_sizes, -1)
    queries = linear(rms_norm(q_a, w.q_norm, g.norm_eps), w.indexer.wq_b).unflatten(-1, (g.index_heads, -1))
    queries = rotate(queries, rotation_at(torch.arange(first, len(ids)), frequencies))
    votes = []
    for segment in segments:
        for group in range(-(-segment.length // g.csa_ratio)):
            # Latents lie in the document's frame: the rest of the way to the request is the segment's offset.
            key = segment.layers[layer].index_keys[group : group + 1]
            key = rotate(key, rotation_at(torch.tensor([segment.offset]), frequencies))[0]
            vote = 0.0
            for row in range(len(queries)):
                score = sum(
                    float(head_weights[row, head]) * max(float(queries[row, head] @ key), 0.0)
                    for head in range(g.index_heads)
                )
                vote += max(score * (g.index_heads * g.index_head_dim) ** -0.5, 0.0)
            votes.append(vote)
    return torch.tensor(votes)


def check(model: Model, documents: Sequence[list[int]], pieces: Sequence[Piece]) -> None:
    """The ranking is the sum over all CSA layers, each of which counts, and the probe says what it ran."""
    made = evaluate(model, [torch.tensor(ids) for ids in documents], NEEDS, Counters())
    ids, sources, session = restored(model, [Memory(sections) for sections in made], pieces)
    runs, counters, g = [source.run for source in sources], Counters(), model.geometry
    found = rank_by_indexer(model, session, runs, ids, counters)
    segments = [segment for segment in session.segments if segment.first in {run.start for run in runs}]
    first = max(len(ids) - g.window, runs[-1].stop)
    layers = {
        layer: naive_scores(model, session.memory_space(), segments, first, ids, layer) for layer in csa_layers(model)
    }
    expected = torch.stack(list(layers.values())).sum(0)
    scale = float(expected.max())
    assert scale > 0
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * scale)
    for votes in layers.values():
        assert not torch.allclose(found, expected - votes, rtol=1e-2, atol=1e-2 * scale)
    ran = g.num_layers - (g.kinds[-1] is not LayerKind.CSA)
    assert counters.probe_row_layers == (len(ids) - first) * ran


@pytest.mark.parametrize("question", [3, 40])
def test_naive_indexer_ranking(served: Served, question: int) -> None:
    """A random checkpoint of nano's proportions; also where the question is longer than the window."""
    documents = [document(length, number) for number, length in enumerate((64, 77))]
    pieces = [new(5), known(documents, 0), new(7, 1), known(documents, 1), new(question, 3)]
    check(served.model, documents, pieces)


@pytest.mark.parametrize("shape", ["nano", "flash", "odd", "one"])
def test_naive_indexer_ranking_on_other_geometries(shape: str) -> None:
    """The last layer of "odd" is HCA, so its rows only leave their latents there; elsewhere it is CSA and scores."""
    torch.manual_seed(3)
    model = tiny_model(shape)
    block = model.geometry.block_length
    documents = [torch.randint(0, 50, (length,)).tolist() for length in (70, block + 41)]
    pieces = [known(documents, 1, block), Piece(list(range(9))), known(documents, 0), Piece(list(range(20, 26)))]
    check(model, documents, pieces)
