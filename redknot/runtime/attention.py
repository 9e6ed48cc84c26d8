"""One layer's attention over a row set: latents and entries written first, then every row reads.

Order inside a layer: all rows leave their latents, complete groups become entries, and only then queries run,
so rows of one forward see each other as the causal masks allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from redknot.latents.segment import LayerLatents, Segment
from redknot.latents.session import CompressorTail
from redknot.model.geometry import LayerKind, RopeSpec
from redknot.model.weights import CompressorWeights
from redknot.ops.attention import Partial, apply_sink_, attend, merge, merge_rows_
from redknot.ops.compressor import overlapped_slots, pool
from redknot.ops.indexer import cut_margins, index_scores, keep_best, kept_indices
from redknot.ops.norm import rms_norm
from redknot.ops.rope import Rotation, rotate, rotate_from, rotation_at
from redknot.runtime.counters import Counters
from redknot.runtime.layout import Block, EntryPart, GroupPlan, RowSet, WindowPart, group_plan
from redknot.runtime.model import HeadSlice, Model

GATHER_WASTE = 3  # gather entries when all of them are more than this many times the widest row's choice


@dataclass(frozen=True)
class Projections:
    """What a layer's input becomes, row by row (see ``AttentionWeights.in_sizes``)."""

    latent: Tensor
    comp_kv: Tensor
    comp_gate: Tensor
    index_kv: Tensor
    index_gate: Tensor
    q_a: Tensor
    index_weights: Tensor

    def of(self, rows: Tensor) -> Projections:
        """The projections of some rows."""
        return Projections(*(tensor[rows] for tensor in vars(self).values()))


def project(model: Model, layer: int, x: Tensor) -> Projections:
    """All projections of the normalised input ``x`` [T, hidden]."""
    weights = model.weights.layers[layer].attn
    return Projections(*linear(x, weights.w_in).split(weights.in_sizes, dim=-1))


def write_latents(model: Model, layer: int, p: Projections, rows: RowSet, counters: Counters) -> None:
    """Store the rows' rotated latents and the entries of the groups they complete."""
    geometry, weights = model.geometry, model.weights.layers[layer].attn
    spec = geometry.rope(layer)
    rotation = rows_rotation(model, rows, spec)
    latent = rotate(rms_norm(p.latent, weights.kv_norm, geometry.norm_eps), rotation)
    for run in rows.runs:
        length = run.rows.stop - run.rows.start
        run.segment.layers[layer].window[run.lo : run.lo + length] = latent[run.rows]
    if weights.compressor is None:
        return
    tails = [session.tails.get(layer) for session in rows.sessions]
    plan = rows_plan(rows, geometry.ratio(layer), geometry.kinds[layer] is LayerKind.CSA, tails)
    kept = [tail for tail in tails if tail is not None]
    kv = torch.cat((*(tail.kv for tail in kept), p.comp_kv))
    gate = torch.cat((*(tail.gate for tail in kept), p.comp_gate))
    index_kv = torch.cat((*(tail.index_kv for tail in kept), p.index_kv))
    index_gate = torch.cat((*(tail.index_gate for tail in kept), p.index_gate))
    _write_entries(
        model, spec, weights.compressor, plan, kv, gate, [t.layers[layer].entries for t, _, _ in plan.targets]
    )
    if weights.indexer is not None:
        keys = [target.layers[layer].index_keys for target, _, _ in plan.targets]
        _write_entries(model, spec, weights.indexer.compressor, plan, index_kv, index_gate, keys)
    counters.entries_refreshed += len(plan.positions)
    _keep_tails(layer, geometry.ratio(layer), rows, tails, (kv, gate, index_kv, index_gate))


def _write_entries(
    model: Model,
    spec: RopeSpec,
    weights: CompressorWeights,
    plan: GroupPlan,
    kv: Tensor,
    gate: Tensor,
    into: list[Tensor],
) -> None:
    if not len(plan.positions):
        return
    d = weights.norm.shape[0]
    own_kv, own_gate = _slots(plan.own, kv, gate)
    own_gate = own_gate + weights.ape
    if plan.before.shape[1]:
        before_kv, before_gate = _slots(plan.before, kv[:, :d], gate[:, :d])
        values = torch.cat((before_kv, own_kv[..., d:]), dim=1)
        gates = torch.cat((before_gate + weights.ape[:, :d], own_gate[..., d:]), dim=1)
    else:
        values, gates = own_kv, own_gate
    rotation = rotation_at(plan.positions, model.frequencies[spec])
    entries = pool(weights, values, gates, rotation, model.geometry.norm_eps)
    for tensor, (_, groups, targets) in zip(into, plan.targets, strict=True):
        tensor[targets] = entries[groups]


def _slots(index: Tensor, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gather raw rows into slots [g, ratio, ...]; an empty slot (-1) has gate -inf."""
    safe = index.clamp(min=0)
    values, gates = kv[safe], gate[safe]
    if bool((index < 0).any()):
        empty = (index < 0).unsqueeze(-1)
        values, gates = values.masked_fill(empty, 0.0), gates.masked_fill(empty, float("-inf"))
    return values, gates


def _keep_tails(
    layer: int, ratio: int, rows: RowSet, tails: list[CompressorTail | None], raw: tuple[Tensor, ...]
) -> None:
    """Remember the raw rows of up to two groups at the end of each session."""
    base, row = 0, sum(len(tail.positions) for tail in tails if tail is not None)
    for session, tail, fresh in zip(rows.sessions, tails, rows.positions, strict=True):
        old = tail.positions if tail is not None else fresh[:0]
        index = torch.cat((base + torch.arange(len(old)), row + torch.arange(len(fresh))))[-2 * ratio :]
        positions = torch.cat((old, fresh))[-2 * ratio :]
        session.tails[layer] = CompressorTail(positions, *(part[index] for part in raw))
        base += len(old)
        row += len(fresh)


def rows_plan(rows: RowSet, ratio: int, overlap: bool, tails: list[CompressorTail | None]) -> GroupPlan:
    """The group plan of a row set, made once for all layers whose kept tails cover the same positions."""
    positions = [tail.positions if tail is not None else torch.empty(0, dtype=torch.int64) for tail in tails]
    key = ("plan", ratio, overlap, tuple(tuple(tail.tolist()) for tail in positions))
    cache = rows.cache
    if key not in cache:
        cache[key] = group_plan(rows, ratio, overlap, positions)
    plan = cache[key]
    assert isinstance(plan, GroupPlan)
    return plan


def rows_rotation(model: Model, rows: RowSet, spec: RopeSpec) -> Rotation:
    """The rotation of every row in its own frame."""
    key = ("rows", spec)
    if key not in rows.cache:
        rows.cache[key] = rotation_at(rows.frame_positions, model.frequencies[spec])
    rotation = rows.cache[key]
    assert isinstance(rotation, Rotation)
    return rotation


def attention(model: Model, layer: int, p: Projections, rows: RowSet, heads: HeadSlice, counters: Counters) -> Tensor:
    """The grouped, un-rotated, first-projected output Z of some heads: [T, G * R] (this rank's groups)."""
    geometry, weights = model.geometry, model.weights.layers[layer].attn
    q_a = rms_norm(p.q_a, weights.q_norm, geometry.norm_eps)
    groups = heads.wo_a.shape[0]
    z = torch.empty(rows.size, groups, geometry.o_lora_rank)
    for block in rows.blocks:
        output = _block(model, layer, p, q_a[block.rows], block, heads, counters)
        grouped = output.view(block.size, groups, -1).transpose(0, 1)
        z[block.rows] = torch.bmm(grouped, heads.wo_a).transpose(0, 1)
    counters.add_product(rows.size, heads.heads * geometry.head_dim, geometry.q_lora_rank + geometry.o_lora_rank)
    return z.flatten(1)


def _block(
    model: Model, layer: int, p: Projections, q_a: Tensor, block: Block, heads: HeadSlice, counters: Counters
) -> Tensor:
    """Attention output [t, h, d] of one block, rotated back."""
    geometry = model.geometry
    spec, d = geometry.rope(layer), geometry.head_dim
    q = linear(q_a, heads.wq).view(block.size, heads.heads, d)
    q = rms_norm(q, None, geometry.norm_eps).mul_(d**-0.5)
    turned = q[..., d - geometry.rope_dim :].clone()
    whole: Partial | None = None
    for part in block.windows:
        whole = _window(model, layer, q, turned, block, part, spec, whole, counters)
    assert whole is not None
    ratio = geometry.ratio(layer)
    if ratio and block.entries[ratio]:
        kept = _choose(model, layer, p, q_a, block, block.entries[ratio], counters)
        for number, part in enumerate(block.entries[ratio]):
            rotation = _frame(model, block, spec, part.segment)
            rotate_from(q, turned, rotation)
            chosen = kept[number] if kept is not None else None
            partial = _entries(q[part.row :], part, part.segment.layers[layer], chosen, counters)
            rotate_from(partial.output, None, rotation[part.row :].inverse())
            if part.row == 0:
                whole = merge([whole, partial])
            else:
                merge_rows_(whole, torch.arange(part.row, block.size), partial)
    return apply_sink_(whole, heads.sinks)


def _window(
    model: Model,
    layer: int,
    q: Tensor,
    turned: Tensor,
    block: Block,
    part: WindowPart,
    spec: RopeSpec,
    whole: Partial | None,
    counters: Counters,
) -> Partial:
    """Merge one window part into the block's output so far."""
    key = (id(part), spec)
    if key not in block.rotations:
        block.rotations[key] = rotation_at(block.positions[part.rows] - part.offsets, model.frequencies[spec])
    rotation = block.rotations[key]
    assert isinstance(rotation, Rotation)
    n, m = part.groups
    picked = q[part.rows]
    rotate_from(picked, turned[part.rows], rotation)
    keys = torch.cat([segment.layers[layer].window[index] for segment, index in part.keys])
    partial = attend(picked.view(n, m, *picked.shape[1:]), keys, part.mask)
    rotate_from(partial.output, None, rotation.inverse())
    rows = part.rows
    if part.take is not None:
        partial, rows = Partial(partial.output[part.take], partial.lse[part.take]), rows[part.take]
    counters.add_pairs(part.pairs, q.shape[1], q.shape[2])
    if len(rows) == block.size and whole is None:
        return partial
    if whole is None:
        whole = Partial(torch.zeros_like(q), q.new_full(q.shape[:2], float("-inf")))
    merge_rows_(whole, rows, partial)
    return whole


def _frame(model: Model, block: Block, spec: RopeSpec, segment: Segment) -> Rotation:
    """The rotation of a block's rows in a segment's frame."""
    key = (id(segment), spec)
    if key not in block.rotations:
        block.rotations[key] = rotation_at(block.positions - segment.offset, model.frequencies[spec])
    rotation = block.rotations[key]
    assert isinstance(rotation, Rotation)
    return rotation


def _entries(q: Tensor, part: EntryPart, latents: LayerLatents, kept: Tensor | None, counters: Counters) -> Partial:
    """Rows against one segment's entries: all visible ones, or those ``kept`` [t, count]."""
    keys = latents.entries[: part.count]
    if kept is None:
        counters.add_pairs(int(part.visible.sum()), q.shape[1], q.shape[2])
        mask = None if part.mask is None else part.mask.unsqueeze(0)
        return attend(q.unsqueeze(0), keys.unsqueeze(0), mask)
    counters.add_pairs(int(kept.sum()), q.shape[1], q.shape[2])
    widest = int(kept.sum(-1).max())
    if part.count <= GATHER_WASTE * widest:
        mask = torch.zeros(kept.shape).masked_fill_(~kept, float("-inf"))
        return attend(q.unsqueeze(0), keys.unsqueeze(0), mask.unsqueeze(0))
    indices, mask = kept_indices(kept)
    return attend(q.unsqueeze(1), keys[indices], mask.unsqueeze(1))


def _choose(
    model: Model, layer: int, p: Projections, q_a: Tensor, block: Block, parts: list[EntryPart], counters: Counters
) -> list[Tensor] | None:
    """The entries each row keeps, per segment [t, count]; None when every row keeps all it sees."""
    geometry, indexer = model.geometry, model.weights.layers[layer].attn.indexer
    if indexer is None or sum(part.count for part in parts) <= geometry.index_topk:
        return None
    scores = block_scores(model, layer, p, q_a, block, parts, counters)
    kept = keep_best(scores, geometry.index_topk)
    if counters.cuts is not None:
        counters.cuts.append((block.positions, cut_margins(scores, geometry.index_topk)))
    columns = kept.split([part.count for part in parts], dim=1)
    return [chosen[part.row :] for chosen, part in zip(columns, parts, strict=True)]


def block_scores(
    model: Model, layer: int, p: Projections, q_a: Tensor, block: Block, parts: list[EntryPart], counters: Counters
) -> Tensor:
    """Indexer scores of a block's rows over all segments' entries side by side, hidden ones -inf: [t, N]."""
    geometry, indexer = model.geometry, model.weights.layers[layer].attn.indexer
    assert indexer is not None
    q = linear(q_a, indexer.wq_b).view(block.size, geometry.index_heads, geometry.index_head_dim)
    turned = q[..., geometry.index_head_dim - geometry.rope_dim :].clone()
    weights = p.index_weights[block.rows] * (geometry.index_head_dim * geometry.index_heads) ** -0.5
    scores = q.new_full((block.size, sum(part.count for part in parts)), float("-inf"))
    column = 0
    for part in parts:
        rotate_from(q, turned, _frame(model, block, geometry.rope(layer), part.segment))
        keys = part.segment.layers[layer].index_keys[: part.count]
        found = index_scores(q[part.row :], keys, weights[part.row :])
        if part.mask is not None:
            found = found + part.mask
        scores[part.row :, column : column + part.count] = found
        counters.add_product((block.size - part.row) * part.count, geometry.index_heads, geometry.index_head_dim)
        column += part.count
    return scores
