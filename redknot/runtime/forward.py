"""The layer loop over rows: any subset of rows may run in each layer; what does not run is read from latents.

A forward is a list of stages. A stage runs some layers over one row set; between stages rows leave (they are
skipped from there on) or enter (their residual streams are restored from an artifact). In a stage's last layer
only the rows that go on run attention and experts; the others just leave their latents.

Which rows these are is planned on the host, in host tensors, and copied to the model's device on first use; nothing in
the loop waits for the device, so that it may lag behind by as many layers as it likes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from redknot.device import on_device
from redknot.ops.hyper import collapse, enter, leave
from redknot.ops.moe import FanOut, route
from redknot.ops.norm import rms_norm
from redknot.runtime.attention import attention, write_latents
from redknot.runtime.capture import Capture
from redknot.runtime.counters import Counters
from redknot.runtime.layout import RowSet
from redknot.runtime.model import Model
from redknot.runtime.scope import Projections, Scope, project

if TYPE_CHECKING:  # it needs pydantic, which what runs does not
    from redknot.model.heads import HeadTable


@dataclass(frozen=True)
class HeadSplit:
    """Rows of a stage whose Local heads are restored instead of run; ``rows`` are the host's."""

    heads: HeadTable  # which ones are Global
    rows: Tensor  # [t] rows of the stage's row set, ascending
    restored: Callable[[int], Tensor]  # of a layer: Z_L [t, G_rank * R], on the model's device


@dataclass(frozen=True)
class Stage:
    """Consecutive layers that run the same rows; its tensors are the host's."""

    layers: range
    rows: RowSet
    token_ids: Tensor  # [T]
    go_on: Tensor  # rows that leave the last of these layers: those of the next stage, or those whose logits count
    fan_out: FanOut | None = None
    split: HeadSplit | None = None
    # Rows [r] of this stage that enter here, and their streams [r, hc, hidden] on the model's device, read when the
    # stage begins.
    restored: tuple[Tensor, Callable[[], Tensor]] | None = None
    refresh: bool = True  # whether groups that these rows complete become entries; else those that are there stay


def forward(model: Model, stages: list[Stage], counters: Counters, capture: Capture | None = None) -> Tensor:
    """Run the stages; returns logits of the rows that leave the last one, float32 [rows, vocab].

    Latents of all rows that run are left in their sessions' segments. ``capture`` (offline, or a probe) sees every
    layer. What a row computes after its last latents is dropped, not run: neither arm of a comparison runs more.
    HandleError for a session whose memory was given back or is in another tier, before anything runs.
    """
    geometry = model.geometry
    streams = torch.empty(0, device=model.device)
    for session in stages[0].rows.sessions:
        session.check()
    for stage in stages:
        _require(stage, stage.layers.start)
        streams = _entering(model, stage, streams)
        for layer in stage.layers:
            _require(stage, layer)
            if capture is not None:
                capture.before_layer(layer, stage.rows, streams)
            leaves = layer == stage.layers[-1] and len(stage.go_on) < stage.rows.size
            go_on = stage.go_on if leaves else None
            streams = _layer(model, layer, stage, streams, go_on, counters, capture)
            if capture is not None:
                capture.after_layer(layer, stage.rows if go_on is None else _only(stage.rows, go_on), streams)
    counters.settle()
    hidden = rms_norm(collapse(model.weights.head_hc, streams, geometry), model.weights.norm, geometry.norm_eps)
    counters.add_product(len(hidden), geometry.hidden_size, geometry.vocab_size)
    counters.add_product(len(hidden), geometry.hc_mult * geometry.hidden_size, geometry.hc_mult + 1)
    return linear(hidden, model.weights.head)


def _require(stage: Stage, layer: int) -> None:
    """Have what the sessions of a stage read in a layer."""
    for session in stage.rows.sessions:
        session.require(layer)


def _entering(model: Model, stage: Stage, streams: Tensor) -> Tensor:
    """Residual streams of a stage's rows: embedded, handed on, or restored."""
    if stage.layers.start == 0:
        embedded = model.weights.embed[on_device(stage.token_ids, model.device)]
        return embedded.unsqueeze(1).expand(-1, model.geometry.hc_mult, -1)
    if stage.restored is None:
        return streams
    rows, read = stage.restored
    restored = read()
    entered = restored.new_empty(stage.rows.size, *restored.shape[1:])
    entered[on_device(_others(rows, stage.rows.size), model.device)] = streams
    entered[on_device(rows, model.device)] = restored
    return entered


def _others(rows: Tensor, total: int) -> Tensor:
    """The numbers below ``total`` that are not in ``rows``, ascending."""
    others = torch.ones(total, dtype=torch.bool)
    others[rows] = False
    return others.nonzero().flatten()


def _layer(
    model: Model,
    layer: int,
    stage: Stage,
    streams: Tensor,
    go_on: Tensor | None,
    counters: Counters,
    capture: Capture | None,
) -> Tensor:
    weights, geometry, rows, split = model.weights.layers[layer], model.geometry, stage.rows, stage.split
    scope = Scope(model, layer, counters, capture)
    tokens = scope.placed(rows.cache, stage.token_ids)
    x, mixing = enter(weights.attn_hc, streams, geometry)
    p = project(scope, rms_norm(x, weights.attn_norm, geometry.norm_eps))
    write_latents(scope, p, rows, refresh=stage.refresh)
    if stage.refresh:  # else they ran for windows alone, which is counted there
        counters.add_rows(layer, rows.size)
    if go_on is not None:
        rows, split, mine = _only(rows, go_on), _still(split, go_on), scope.placed(rows.cache, go_on)
        tokens, p, streams, mixing = tokens[mine], p.of(mine), streams[mine], mixing.of(mine)
    z = _projected(scope, p, rows, split)
    output = model.group.all_reduce(linear(z, weights.attn.wo_b))
    counters.add_product(rows.size, z.shape[1], geometry.hidden_size)
    streams = leave(mixing, output, streams)
    x, mixing = enter(weights.ffn_hc, streams, geometry)
    x = rms_norm(x, weights.ffn_norm, geometry.norm_eps)
    routing = route(weights.moe, x, tokens, geometry, stage.fan_out)
    output, ran = model.operations.experts(weights.moe, x, routing, geometry.swiglu_limit)
    width, shared_width = geometry.expert_width, weights.moe.shared_w2.shape[1]
    counters.add_product(rows.size, geometry.hidden_size, geometry.num_experts)
    counters.add_experts(routing, ran, geometry.hidden_size, width, shared_width)
    counters.add_streams(stage.rows.size + rows.size, 2 * rows.size, geometry.hc_mult, geometry.hidden_size)
    return leave(mixing, model.group.all_reduce(output), streams)


def _still(split: HeadSplit | None, go_on: Tensor) -> HeadSplit | None:
    """The part of a head split that concerns the rows that go on."""
    if split is None:
        return None
    keep = torch.isin(split.rows, go_on).nonzero().flatten()
    rows = torch.searchsorted(go_on, split.rows[keep])

    def restored(layer: int) -> Tensor:
        every = split.restored(layer)
        return every[on_device(keep, every.device)]

    return HeadSplit(split.heads, rows, restored)


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


def _projected(scope: Scope, p: Projections, rows: RowSet, split: HeadSplit | None) -> Tensor:
    """Z of the rows [T, G * R]: all heads online, or Global heads online plus the restored Local contribution."""
    model, layer = scope.model, scope.layer
    scope.counters.row_layers += rows.size
    everything = model.all_heads(layer)
    if split is None or not len(split.rows):
        return attention(scope, p, rows, everything).flatten(1)
    # A row is replaced once, never added to: it is either whole (its Local heads ran) or restored.
    z = torch.empty(rows.size, everything.wo_a.shape[0], scope.geometry.o_lora_rank, device=model.device)
    whole = _others(split.rows, rows.size)
    if len(whole):
        mine = on_device(whole, model.device)
        attention(scope, p.of(mine), _only(rows, whole), everything, (z, mine))
    mine = scope.placed(rows.cache, split.rows)
    few = model.global_heads(layer, split.heads)
    attention(scope, p.of(mine), _only(rows, split.rows), few, (z, mine), split.restored(layer))
    scope.counters.split_row_layers += len(split.rows)
    return z.flatten(1)
