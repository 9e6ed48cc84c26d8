"""Segment-grouped DeepSeek-V4 written from the definition: whole sequences, dense masks, request positions throughout.

No frames, no parts, no merges, no gathers: what the runtime's layout and relocation are held to where segments do
not end on group boundaries, which ``transformers`` cannot compute. It shares the operations that are held to
transformers' modules one by one (hyper-connections, router, norm, rotation).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from redknot.model.geometry import LayerKind
from redknot.model.weights import CompressorWeights, MoeWeights
from redknot.ops.hyper import collapse, enter, leave
from redknot.ops.moe import gated, route
from redknot.ops.norm import rms_norm
from redknot.ops.rope import rotate, rotation_at
from redknot.runtime.model import Model

NEG_INF = float("-inf")


@torch.inference_mode()
def naive_forward(model: Model, ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """Logits of every row; ``lengths`` are the segments', all closed but the last."""
    geometry, weights = model.geometry, model.weights
    streams = weights.embed[ids].unsqueeze(1).expand(-1, geometry.hc_mult, -1)
    for number, layer in enumerate(weights.layers):
        x, mixing = enter(layer.attn_hc, streams, geometry)
        output = _attention(model, number, rms_norm(x, layer.attn_norm, geometry.norm_eps), lengths)
        streams = leave(mixing, output, streams)
        x, mixing = enter(layer.ffn_hc, streams, geometry)
        x = rms_norm(x, layer.ffn_norm, geometry.norm_eps)
        streams = leave(mixing, _experts(model, layer.moe, x, ids), streams)
    return linear(rms_norm(collapse(weights.head_hc, streams, geometry), weights.norm, geometry.norm_eps), weights.head)


def _experts(model: Model, weights: MoeWeights, x: Tensor, ids: Tensor) -> Tensor:
    routing, limit = route(weights, x, ids, model.geometry), model.geometry.swiglu_limit
    output = gated(x, weights.shared_w13, weights.shared_w2, limit)
    for expert in range(model.geometry.num_experts):
        share = (routing.weights * (routing.experts == expert)).sum(-1, keepdim=True)
        output = output + share * gated(x, weights.w13[expert], weights.w2[expert], limit)
    return output


def _attention(model: Model, number: int, x: Tensor, lengths: Sequence[int]) -> Tensor:
    g, w = model.geometry, model.weights.layers[number].attn
    frequencies, at = model.frequencies[g.rope(number)], torch.arange(len(x))
    turn = rotation_at(at, frequencies)
    latent, kv, gate, index_kv, index_gate, q_a, index_weights = linear(x, w.w_in).split(w.in_sizes, -1)
    keys = rotate(rms_norm(latent, w.kv_norm, g.norm_eps), turn)
    q_a = rms_norm(q_a, w.q_norm, g.norm_eps)
    q = rms_norm(linear(q_a, w.wq_b.flatten(0, 1)).unflatten(-1, (g.num_heads, -1)), None, g.norm_eps)
    seen = (at <= at.unsqueeze(-1)) & (at > at.unsqueeze(-1) - g.window)
    if w.compressor is not None:
        groups = _groups(lengths, g.ratio(number), overlap=g.kinds[number] is LayerKind.CSA)
        firsts = torch.tensor([rows[0] for rows, _ in groups], dtype=torch.int64)
        lasts = torch.tensor([rows[-1] for rows, _ in groups], dtype=torch.int64)
        entries = rotate(_pool(w.compressor, groups, kv, gate, g.norm_eps), rotation_at(firsts, frequencies))
        visible = lasts <= at.unsqueeze(-1)
        if w.indexer is not None:
            index_keys = _pool(w.indexer.compressor, groups, index_kv, index_gate, g.norm_eps)
            index_keys = rotate(index_keys, rotation_at(firsts, frequencies))
            index_q = rotate(linear(q_a, w.indexer.wq_b).unflatten(-1, (g.index_heads, -1)), turn)
            scores = torch.einsum("thd,nd->thn", index_q, index_keys).relu()
            scores = (scores * index_weights.unsqueeze(-1)).sum(1).masked_fill(~visible, NEG_INF)
            order = scores.sort(dim=-1, descending=True, stable=True).indices[:, : g.index_topk]
            visible = visible & torch.zeros_like(visible).scatter(-1, order, True)
        keys, seen = torch.cat((keys, entries)), torch.cat((seen, visible), -1)
    logits = torch.einsum("thd,kd->thk", rotate(q, turn), keys) * g.head_dim**-0.5
    logits = logits.masked_fill(~seen.unsqueeze(1), NEG_INF)
    sinks = w.sinks.view(1, -1, 1).expand(len(x), -1, 1)
    probabilities = torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
    output = rotate(probabilities @ keys, turn.inverse()).unflatten(1, (g.o_groups, -1)).flatten(2)
    return linear(torch.einsum("tgi,gri->tgr", output, w.wo_a).flatten(1), w.wo_b)


def _groups(lengths: Sequence[int], ratio: int, overlap: bool) -> list[tuple[list[int], list[int]]]:
    """(rows, rows of the group before) of every entry; the last segment's open group has none."""
    groups: list[tuple[list[int], list[int]]] = []
    previous: list[int] = []
    first = 0
    for number, length in enumerate(lengths):
        for lo in range(first, first + length, ratio):
            rows = list(range(lo, min(lo + ratio, first + length)))
            if len(rows) < ratio and number == len(lengths) - 1:
                break
            groups.append((rows, previous if overlap else []))
            previous = rows
        first += length
    return groups


def _pool(
    w: CompressorWeights, groups: list[tuple[list[int], list[int]]], kv: Tensor, gate: Tensor, eps: float
) -> Tensor:
    d = w.norm.shape[0]
    entries = []
    for rows, before in groups:
        values, gates = kv[rows][:, -d:], gate[rows][:, -d:] + w.ape[: len(rows), -d:]
        if before:
            values = torch.cat((kv[before][:, :d], values))
            gates = torch.cat((gate[before][:, :d] + w.ape[: len(before), :d], gates))
        entries.append((values * gates.softmax(0)).sum(0))
    return rms_norm(torch.stack(entries), w.norm, eps) if entries else kv.new_empty(0, d)
