"""The layer loop over rows: any subset of rows may run in each layer; what does not run is read from latents.

A forward is a list of stages. A stage runs some layers over one row set; between stages rows leave (they are
skipped from there on) or enter (their residual streams are restored from an artifact). In the last layer only the
rows whose logits are wanted go on after their latents are written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from redknot.ops.hyper import collapse, enter, leave
from redknot.ops.moe import FanOut, experts_forward, route
from redknot.ops.norm import rms_norm
from redknot.runtime.attention import Projections, attention, project, write_latents
from redknot.runtime.capture import Capture
from redknot.runtime.counters import Counters
from redknot.runtime.layout import RowSet
from redknot.runtime.model import Model


@dataclass(frozen=True)
class HeadSplit:
    """Rows of a stage whose Local heads are restored instead of run."""

    global_heads: tuple[int, ...]  # positions within each output group
    rows: Tensor  # [t] rows of the stage's row set, ascending
    restored: dict[int, Tensor]  # layer -> Z_L [t, G_rank * R]


@dataclass(frozen=True)
class Stage:
    """Consecutive layers that run the same rows."""

    layers: range
    rows: RowSet
    token_ids: Tensor  # [T]
    fan_out: FanOut | None = None
    split: HeadSplit | None = None
    take: Tensor | None = None  # [T] row of the stage before it, -1 where the streams are restored; None: as they are
    restored: Tensor | None = None  # [rows with -1, hc, hidden], in order


def forward(
    model: Model, stages: list[Stage], wanted: Tensor, counters: Counters, capture: Capture | None = None
) -> Tensor:
    """Run the stages; returns logits of the ``wanted`` rows of the last stage, float32 [len(wanted), vocab].

    Latents of all rows that run are left in their sessions' segments. ``capture`` (offline) sees every layer.
    """
    geometry = model.geometry
    last = geometry.num_layers - 1
    streams = torch.empty(0)
    for stage in stages:
        streams = _entering(model, stage, streams)
        for layer in stage.layers:
            if capture is not None:
                capture.before_layer(layer, streams)
            streams = _layer(model, layer, stage, streams, wanted if layer == last else None, counters, capture)
    hidden = rms_norm(collapse(model.weights.head_hc, streams, geometry), model.weights.norm, geometry.norm_eps)
    counters.add_product(len(wanted), geometry.hidden_size, geometry.vocab_size)
    return linear(hidden, model.weights.head)


def _entering(model: Model, stage: Stage, streams: Tensor) -> Tensor:
    """Residual streams of a stage's rows."""
    if stage.layers.start == 0:
        embedded = model.weights.embed[stage.token_ids]
        return embedded.unsqueeze(1).expand(-1, model.geometry.hc_mult, -1)
    if stage.take is None:
        return streams
    entered = (
        streams[stage.take.clamp(min=0)] if len(streams) else streams.new_empty(len(stage.take), *streams.shape[1:])
    )
    if stage.restored is not None:
        entered[stage.take < 0] = stage.restored
    return entered


def _layer(
    model: Model,
    layer: int,
    stage: Stage,
    streams: Tensor,
    wanted: Tensor | None,
    counters: Counters,
    capture: Capture | None,
) -> Tensor:
    weights, geometry, rows, tokens = model.weights.layers[layer], model.geometry, stage.rows, stage.token_ids
    x, mixing = enter(weights.attn_hc, streams, geometry)
    p = project(model, layer, rms_norm(x, weights.attn_norm, geometry.norm_eps))
    counters.add_product(rows.size, geometry.hidden_size, sum(weights.attn.in_sizes))
    write_latents(model, layer, p, rows, counters)
    if wanted is not None:
        # Only latents of the other rows are needed from here on; neither arm of a comparison computes more.
        rows, tokens = _only(rows, wanted), tokens[wanted]
        p = p.of(wanted)
        streams, mixing = streams[wanted], mixing.of(wanted)
    z = _projected(model, layer, stage if wanted is None else None, p, rows, counters, capture)
    output = model.group.all_reduce(linear(z, weights.attn.wo_b))
    counters.add_product(rows.size, z.shape[1], geometry.hidden_size)
    streams = leave(mixing, output, streams)
    x, mixing = enter(weights.ffn_hc, streams, geometry)
    x = rms_norm(x, weights.ffn_norm, geometry.norm_eps)
    routing = route(weights.moe, x, tokens, geometry, stage.fan_out)
    output, ran = experts_forward(weights.moe, x, routing, geometry.swiglu_limit)
    width, shared_width = geometry.expert_width, weights.moe.shared_w2.shape[1]
    counters.add_experts(routing, ran, geometry.hidden_size, width, shared_width)
    return leave(mixing, model.group.all_reduce(output), streams)


def _only(rows: RowSet, wanted: Tensor) -> RowSet:
    """Part of a row set as a row set of its own, made once."""
    key = ("only", tuple(wanted.tolist()))
    if key not in rows.cache:
        parts, start = [], 0
        for positions in rows.positions:
            mine = wanted[(wanted >= start) & (wanted < start + len(positions))] - start
            parts.append(positions[mine])
            start += len(positions)
        rows.cache[key] = RowSet(rows.geometry, rows.sessions, tuple(parts))
    subset = rows.cache[key]
    assert isinstance(subset, RowSet)
    return subset


def _projected(
    model: Model,
    layer: int,
    stage: Stage | None,
    p: Projections,
    rows: RowSet,
    counters: Counters,
    capture: Capture | None,
) -> Tensor:
    """Z of the rows: all heads online, or Global heads online plus the restored Local contribution."""
    geometry, split = model.geometry, stage.split if stage is not None else None
    counters.row_layers += rows.size
    if capture is not None and capture.wants_local(layer):
        local = attention(model, layer, p, rows, model.heads(layer, capture.local_heads), counters)
        capture.local(layer, local)
        return local + attention(model, layer, p, rows, model.heads(layer, capture.global_heads), counters)
    if split is None or not len(split.rows):
        return attention(model, layer, p, rows, model.all_heads(layer), counters)
    z = torch.empty(rows.size, model.all_heads(layer).wo_a.shape[0] * geometry.o_lora_rank)
    whole = torch.ones(rows.size, dtype=torch.bool)
    whole[split.rows] = False
    for picked, heads in ((whole.nonzero().flatten(), None), (split.rows, split.global_heads)):
        if not len(picked):
            continue
        part = p.of(picked)
        chosen = model.all_heads(layer) if heads is None else model.heads(layer, heads)
        z[picked] = attention(model, layer, part, _only(rows, picked), chosen, counters)
    counters.split_row_layers += len(split.rows)
    # Replaced, never added twice: a row is either whole (its Local heads ran) or restored.
    z[split.rows] += split.restored[layer]
    return z
