"""The DeepSeek-V4 forward over whole equal-length batches, differentiable: what training nano runs.

It shares every operation with the engine (hyper-connections, compressor, router, rotation) and differs in two
places: attention is banded over blocks of ``window`` rows plus all compressed entries under a mask, and the
experts are one dense product, so that autograd sees few large operations. A test holds it to the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, silu

from redknot.model.geometry import Geometry, LayerKind
from redknot.model.weights import AttentionWeights, CompressorWeights, LayerWeights, ModelWeights, MoeWeights
from redknot.ops.compressor import overlapped_slots, pool
from redknot.ops.hyper import collapse, enter, leave
from redknot.ops.moe import route
from redknot.ops.norm import rms_norm
from redknot.ops.rope import Rotation, inverse_frequencies, rotate, rotation_at


@dataclass(frozen=True)
class IndexerTrace:
    """What distilling one CSA layer's indexer needs; B sequences, S rows, N entries."""

    scores: Tensor  # [B, S, N] indexer scores, with gradient
    attention: Tensor  # [B, S, N] attention mass of each entry over all heads, detached
    visible: Tensor  # [S, N] bool


@dataclass
class Pass:
    """One forward: fixed inputs of every layer, and the traces that it leaves."""

    geometry: Geometry
    token_ids: Tensor  # [B, S]
    topk: int | None  # entries a row keeps, None for all
    trace: bool
    frozen: bool  # gradients for the indexers alone
    traces: list[IndexerTrace]

    def rotation(self, layer: int, positions: Tensor) -> Rotation:
        """The rotation of ``positions`` on a layer, shaped to broadcast over the batch."""
        return rotation_at(positions, inverse_frequencies(self.geometry.rope(layer), self.geometry.rope_dim))


def forward(
    weights: ModelWeights,
    geometry: Geometry,
    token_ids: Tensor,
    *,
    topk: int | None = None,
    trace: bool = False,
    frozen: bool = False,
    rows: Tensor | None = None,
) -> tuple[Tensor, list[IndexerTrace]]:
    """Logits of every row, or of the flat indices ``rows`` only.

    ``token_ids`` [B, S] with S a multiple of the window; returns ([B * S or len(rows), vocab], traces).
    """
    state = Pass(geometry, token_ids, topk, trace, frozen, [])
    streams = weights.embed[token_ids].unsqueeze(-2).expand(-1, -1, geometry.hc_mult, -1)
    for layer, layer_weights in enumerate(weights.layers):
        streams = _layer(layer_weights, streams, state, layer)
    flat = streams.flatten(0, 1)
    if rows is not None:
        flat = flat[rows]
    hidden = rms_norm(collapse(weights.head_hc, flat, geometry), weights.norm, geometry.norm_eps)
    return linear(hidden, weights.head), state.traces


def _layer(weights: LayerWeights, streams: Tensor, state: Pass, layer: int) -> Tensor:
    eps = state.geometry.norm_eps
    x, mixing = enter(weights.attn_hc, streams, state.geometry)
    output = _attention(weights.attn, rms_norm(x, weights.attn_norm, eps), state, layer)
    streams = leave(mixing, output, streams)
    x, mixing = enter(weights.ffn_hc, streams, state.geometry)
    return leave(mixing, _moe(weights.moe, rms_norm(x, weights.ffn_norm, eps), state), streams)


def _attention(weights: AttentionWeights, x: Tensor, state: Pass, layer: int) -> Tensor:
    geometry, (batch, length) = state.geometry, x.shape[:2]
    heads, d = weights.wq_b.shape[0], geometry.head_dim
    w_in = weights.w_in.detach() if state.frozen else weights.w_in
    projected = linear(x, w_in).split(weights.in_sizes, dim=-1)
    latent, comp_kv, comp_gate, index_kv, index_gate, q_a, index_weights = projected
    if state.trace and weights.indexer is not None:
        # The indexers learn from the trunk and never move it.
        parts = weights.w_in.split(weights.in_sizes)
        index_kv, index_gate, index_weights = (linear(x.detach(), parts[i]) for i in (3, 4, 6))
    rotation = state.rotation(layer, torch.arange(length))
    q_a = rms_norm(q_a, weights.q_norm, geometry.norm_eps)
    q = linear(q_a, weights.wq_b.flatten(0, 1)).unflatten(-1, (heads, d))
    q = rms_norm(q, None, geometry.norm_eps) * d**-0.5
    q = _turn(q, rotation)
    latent = _turn(rms_norm(latent, weights.kv_norm, geometry.norm_eps), rotation)
    window_logits, window_keys = _window_logits(q, latent, geometry.window)
    parts = [window_logits]
    entries = None
    if weights.compressor is not None and length >= geometry.ratio(layer):
        entries = _entries(weights.compressor, comp_kv, comp_gate, state, layer)
        visible = _visible(length, entries.shape[1], geometry.ratio(layer))
        logits = torch.matmul(q.flatten(1, 2), entries.transpose(-1, -2)).float().unflatten(1, (length, heads))
        hidden = ~visible
        if geometry.kinds[layer] is LayerKind.CSA and (state.trace or state.topk is not None):
            assert weights.indexer is not None
            keys = _entries(weights.indexer.compressor, index_kv, index_gate, state, layer)
            with torch.set_grad_enabled(state.trace):
                q_index = linear(q_a.detach(), weights.indexer.wq_b).unflatten(-1, (geometry.index_heads, -1))
                scores = index_scores(_turn(q_index, rotation), keys, index_weights, geometry)
            scores = scores.masked_fill(~visible, float("-inf"))
            if state.topk is not None and state.topk < entries.shape[1]:
                kept = scores.detach().topk(state.topk, dim=-1).indices
                hidden = (hidden | torch.ones_like(scores, dtype=torch.bool).scatter(-1, kept, False)).unsqueeze(-2)
                hidden = hidden.expand(logits.shape)
            else:
                hidden = hidden[None, :, None]
        else:
            hidden = hidden[None, :, None]
        parts.append(logits.masked_fill(hidden, float("-inf")))
    sinks = weights.sinks.view(1, 1, heads, 1).expand(batch, length, heads, 1)
    probs = torch.cat((*parts, sinks), dim=-1).softmax(-1)
    width = window_logits.shape[-1]
    blocks = probs[..., :width].unflatten(1, (-1, geometry.window)).flatten(2, 3)
    output = torch.matmul(blocks.to(window_keys.dtype), window_keys).view(batch, length, heads, d)
    if entries is not None:
        entry_probs = probs[..., width:-1]
        if geometry.kinds[layer] is LayerKind.CSA and state.trace:
            state.traces.append(IndexerTrace(scores, entry_probs.detach().sum(-2), visible))
        output = output + torch.matmul(entry_probs.flatten(1, 2).to(entries.dtype), entries).view_as(output)
    output = _turn(output, rotation.inverse())
    grouped = output.reshape(batch * length, geometry.o_groups, -1).transpose(0, 1)
    z = torch.matmul(grouped, weights.wo_a.transpose(-1, -2)).transpose(0, 1).reshape(batch, length, -1)
    return linear(z, weights.wo_b)


def _turn(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate [B, S, ...] by row."""
    return rotate(x.transpose(0, 1), rotation).transpose(0, 1)


def _window_logits(q: Tensor, latent: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Scores of each row against its own and the previous block of ``window`` rows.

    Returns (logits [B, S, H, 2 * window], keys [B, S / window, 2 * window, d]).
    """
    batch, length, heads, d = q.shape
    blocks = latent.view(batch, -1, window, d)
    keys = torch.cat((pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks), dim=2)
    logits = torch.matmul(q.reshape(batch, -1, window * heads, d), keys.transpose(-1, -2)).float()
    row, column = torch.arange(window).unsqueeze(-1), torch.arange(2 * window)
    hidden = (column > row + window) | (column <= row)
    hidden = hidden.expand(length // window, -1, -1).clone()
    hidden[0, :, :window] = True
    logits = logits.view(batch, -1, window, heads, 2 * window)
    logits = logits.masked_fill(hidden[None, :, :, None], float("-inf"))
    return logits.view(batch, length, heads, 2 * window), keys


def _entries(weights: CompressorWeights, kv: Tensor, gate: Tensor, state: Pass, layer: int) -> Tensor:
    """All entries of full groups, rotated: [B, S, c * d] x 2 -> [B, S / ratio, d]."""
    ratio = state.geometry.ratio(layer)
    kv, gate = kv.unflatten(1, (-1, ratio)), gate.unflatten(1, (-1, ratio))
    if state.geometry.kinds[layer] is LayerKind.CSA:
        values, gates = overlapped_slots(kv, gate, weights.ape, None, None)
    else:
        values, gates = kv, gate + weights.ape
    entries = pool(weights, values, gates, None, state.geometry.norm_eps)
    return _turn(entries, state.rotation(layer, torch.arange(entries.shape[1]) * ratio))


def _visible(length: int, entries: int, ratio: int) -> Tensor:
    return torch.arange(entries) < ((torch.arange(length) + 1) // ratio).unsqueeze(-1)


def index_scores(q: Tensor, keys: Tensor, head_weights: Tensor, geometry: Geometry) -> Tensor:
    """Lightning indexer: sum over heads of weight * ReLU(q . k); [B, S, Hi, di] x [B, N, di] -> [B, S, N]."""
    dots = torch.matmul(q.flatten(1, 2), keys.transpose(-1, -2)).relu().unflatten(1, q.shape[1:3])
    scale = float(geometry.index_head_dim * geometry.index_heads) ** -0.5
    scores: Tensor = torch.einsum("bshn,bsh->bsn", dots.float(), head_weights.float()) * scale
    return scores


def _moe(weights: MoeWeights, x: Tensor, state: Pass) -> Tensor:
    geometry, flat = state.geometry, x.flatten(0, 1)
    routing = route(weights, flat, state.token_ids.flatten(), geometry)
    dense = torch.zeros(flat.shape[0], geometry.num_experts, dtype=torch.float32)
    dense = dense.scatter(1, routing.experts, routing.weights.float())
    both = torch.cat((weights.w13.flatten(0, 1), weights.shared_w13))
    gate_up = linear(flat, both)
    routed = gate_up[:, : -weights.shared_w13.shape[0]].unflatten(-1, (geometry.num_experts, 2, -1))
    limit = geometry.swiglu_limit
    hidden = silu(routed[:, :, 0].clamp(max=limit)) * routed[:, :, 1].clamp(-limit, limit)
    hidden = (hidden * dense.unsqueeze(-1).to(hidden.dtype)).flatten(1)
    gate, up = gate_up[:, -weights.shared_w13.shape[0] :].chunk(2, dim=-1)
    shared = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    down = torch.cat((weights.w2.transpose(0, 1).flatten(1), weights.shared_w2), dim=1)
    return linear(torch.cat((hidden, shared), dim=1), down).view_as(x)
