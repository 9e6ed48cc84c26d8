"""One layer's attention over a row set: latents and entries written first, then every row reads.

Order inside a layer: all rows leave their latents, complete groups become entries, and only then queries run,
so rows of one forward see each other as the causal masks allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from redknot.latents.segment import Segment
from redknot.latents.session import CompressorTail
from redknot.model.geometry import Geometry, LayerKind
from redknot.model.weights import AttentionWeights, CompressorWeights
from redknot.ops.attention import Partial, apply_sink_, attend, merge_, merge_rows_
from redknot.ops.compressor import pool
from redknot.ops.indexer import cut_margins, index_scores, keep_best, kept_indices
from redknot.ops.norm import rms_norm
from redknot.ops.rope import Rotation, rotate, rotate_from, rotation_at
from redknot.runtime.capture import Capture
from redknot.runtime.counters import Counters
from redknot.runtime.layout import Block, EntryPart, GroupPlan, RowSet, WindowPart, group_plan
from redknot.runtime.model import HeadSlice, Model

GATHER_WASTE = 3  # gather entries when all of them are more than this many times the widest row's choice


@dataclass(frozen=True)
class Scope:
    """One layer of one forward: what every step of it needs to know."""

    model: Model
    layer: int
    counters: Counters
    capture: Capture | None = None

    @property
    def geometry(self) -> Geometry:
        """The model's geometry."""
        return self.model.geometry

    @property
    def weights(self) -> AttentionWeights:
        """This layer's attention weights."""
        return self.model.weights.layers[self.layer].attn

    @property
    def ratio(self) -> int:
        """Tokens per entry of this layer, 0 without entries."""
        return self.geometry.ratio(self.layer)

    @property
    def frequencies(self) -> Tensor:
        """Inverse frequencies of this layer's rotary kind."""
        return self.model.frequencies[self.geometry.rope(self.layer)]

    def rotation(self, cache: dict[object, object], owner: object, positions: Tensor) -> Rotation:
        """The rotation of ``positions`` on this layer's rotary kind, made once per ``owner`` in ``cache``."""
        key = ("rotation", owner, self.geometry.rope(self.layer))
        if key not in cache:
            cache[key] = rotation_at(positions, self.frequencies)
        rotation = cache[key]
        assert isinstance(rotation, Rotation)
        return rotation


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


def project(scope: Scope, x: Tensor) -> Projections:
    """All projections of the normalised input ``x`` [T, hidden]."""
    weights = scope.weights
    scope.counters.add_product(x.shape[0], x.shape[1], weights.w_in.shape[0])
    return Projections(*linear(x, weights.w_in).split(weights.in_sizes, dim=-1))


def write_latents(scope: Scope, p: Projections, rows: RowSet) -> None:
    """Store the rows' rotated latents and the entries of the groups they complete."""
    geometry, weights, layer = scope.geometry, scope.weights, scope.layer
    rotation = scope.rotation(rows.cache, "rows", rows.frame_positions)
    latent = rotate(rms_norm(p.latent, weights.kv_norm, geometry.norm_eps), rotation)
    for run in rows.runs:
        length = run.rows.stop - run.rows.start
        run.segment.layers[layer].window[run.lo : run.lo + length] = latent[run.rows]
    if weights.compressor is None:
        return
    tails = [session.tails.get(layer) for session in rows.sessions]
    plan = _rows_plan(scope, rows, tails)
    fresh = (p.comp_kv, p.comp_gate, p.index_kv, p.index_gate)
    kept = [tail.raw for tail in tails if tail is not None]
    raw = tuple(torch.cat((*(old[i] for old in kept), new)) for i, new in enumerate(fresh))
    targets = [segment.layers[layer] for segment, _, _ in plan.targets]
    _write_entries(scope, weights.compressor, plan, raw[:2], [target.entries for target in targets])
    if weights.indexer is not None:
        _write_entries(scope, weights.indexer.compressor, plan, raw[2:], [target.index_keys for target in targets])
    scope.counters.entries_refreshed += len(plan.positions)
    _keep_tails(scope, rows, tails, raw)


def _rows_plan(scope: Scope, rows: RowSet, tails: list[CompressorTail | None]) -> GroupPlan:
    """The group plan of a row set, made once for all layers of a ratio whose kept tails cover the same positions."""
    positions = [tail.positions if tail is not None else torch.empty(0, dtype=torch.int64) for tail in tails]
    key = ("plan", scope.ratio, tuple(tuple(tail.tolist()) for tail in positions))
    if key not in rows.cache:
        overlap = scope.geometry.kinds[scope.layer] is LayerKind.CSA
        rows.cache[key] = group_plan(rows, scope.ratio, overlap, positions)
    plan = rows.cache[key]
    assert isinstance(plan, GroupPlan)
    return plan


def _write_entries(
    scope: Scope, weights: CompressorWeights, plan: GroupPlan, raw: tuple[Tensor, ...], into: list[Tensor]
) -> None:
    """Pool the planned groups of raw (kv, gate) rows and store them, segment by segment."""
    if not len(plan.positions):
        return
    d = weights.norm.shape[0]
    kv, gate = raw
    values, gates = _slots(plan.own, kv, gate)
    gates = gates + weights.ape
    if plan.before.shape[1]:
        before, before_gates = _slots(plan.before, kv[:, :d], gate[:, :d])
        values = torch.cat((before, values[..., d:]), dim=1)
        gates = torch.cat((before_gates + weights.ape[:, :d], gates[..., d:]), dim=1)
    rotation = rotation_at(plan.positions, scope.frequencies)
    entries = pool(weights, values, gates, rotation, scope.geometry.norm_eps)
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


def _keep_tails(scope: Scope, rows: RowSet, tails: list[CompressorTail | None], raw: tuple[Tensor, ...]) -> None:
    """Remember the raw rows of up to two groups at the end of each session."""
    base, row = 0, sum(len(tail.positions) for tail in tails if tail is not None)
    for session, tail, fresh in zip(rows.sessions, tails, rows.positions, strict=True):
        old = tail.positions if tail is not None else fresh[:0]
        index = torch.cat((base + torch.arange(len(old)), row + torch.arange(len(fresh))))[-2 * scope.ratio :]
        positions = torch.cat((old, fresh))[-2 * scope.ratio :]
        session.tails[scope.layer] = CompressorTail(positions, tuple(part[index] for part in raw))
        base += len(old)
        row += len(fresh)


def attention(scope: Scope, p: Projections, rows: RowSet, heads: HeadSlice) -> Tensor:
    """The grouped, un-rotated, first-projected output Z of some heads: [T, G * R] (this rank's groups)."""
    geometry = scope.geometry
    q_a = rms_norm(p.q_a, scope.weights.q_norm, geometry.norm_eps)
    groups = heads.wo_a.shape[0]
    z = torch.empty(rows.size, groups, geometry.o_lora_rank)
    local = scope.capture.local_slice(scope.model, scope.layer) if scope.capture is not None else None
    z_local = torch.empty_like(z) if local is not None else None
    for block in rows.blocks:
        output = _block(scope, p, q_a[block.rows], block, heads).view(block.size, groups, -1, geometry.head_dim)
        z[block.rows] = _project_out(output, heads)
        if scope.capture is not None and local is not None and z_local is not None:
            # A second, smaller product: the first stays bit for bit what a prefill without capture computes.
            z_local[block.rows] = _project_out(output[:, :, list(scope.capture.local_heads)], local)
    if scope.capture is not None and z_local is not None:
        scope.capture.local(scope.layer, z_local.flatten(1))
    scope.counters.add_product(rows.size, heads.heads * geometry.head_dim, geometry.q_lora_rank + geometry.o_lora_rank)
    return z.flatten(1)


def _project_out(output: Tensor, heads: HeadSlice) -> Tensor:
    """First output projection, group by group: [t, G, h / G, d] -> [t, G, R]."""
    return torch.bmm(output.flatten(2).transpose(0, 1), heads.wo_a).transpose(0, 1)


def _block(scope: Scope, p: Projections, q_a: Tensor, block: Block, heads: HeadSlice) -> Tensor:
    """Attention output [t, h, d] of one block, rotated back."""
    geometry, d = scope.geometry, scope.geometry.head_dim
    q = linear(q_a, heads.wq).view(block.size, heads.heads, d)
    q = rms_norm(q, None, geometry.norm_eps).mul_(d**-0.5)
    turned = q[..., d - geometry.rope_dim :].clone()
    whole: Partial | None = None
    for part in block.windows:
        whole = _window(scope, q, turned, block, part, whole)
    assert whole is not None
    if scope.ratio and block.entries[scope.ratio]:
        parts = block.entries[scope.ratio]
        kept = _choose(scope, p, q_a, block, parts)
        for number, entries in enumerate(parts):
            rotation = _frame(scope, block, entries.segment)
            rotate_from(q, turned, rotation)
            partial = _entries(scope, q[entries.row :], entries, kept[number] if kept is not None else None)
            rotate_from(partial.output, None, rotation[entries.row :].inverse())
            scope.counters.add_pairs(block.size - entries.row, heads.heads, d)  # a merge costs as much as one more key
            merge_(Partial(whole.output[entries.row :], whole.lse[entries.row :]), partial)
    return apply_sink_(whole, heads.sinks)


def _window(scope: Scope, q: Tensor, turned: Tensor, block: Block, part: WindowPart, whole: Partial | None) -> Partial:
    """Merge one window part into the block's output so far."""
    rotation = scope.rotation(block.cache, id(part), block.positions[part.rows] - part.offsets)
    picked = q[part.rows]
    rotate_from(picked, turned[part.rows], rotation)
    keys = torch.cat([segment.layers[scope.layer].window[index] for segment, index in part.keys])
    partial = attend(picked.view(*part.groups, *picked.shape[1:]), keys, part.mask)
    rotate_from(partial.output, None, rotation.inverse())
    rows = part.rows
    if part.take is not None:
        partial, rows = Partial(partial.output[part.take], partial.lse[part.take]), rows[part.take]
    scope.counters.add_pairs(part.pairs, q.shape[1], q.shape[2])
    if len(rows) == block.size and whole is None:
        return partial
    if whole is None:
        whole = Partial(torch.empty_like(q), q.new_empty(q.shape[:2]))
    if part.own:  # these parts share the block's rows out among them: nothing to merge with yet
        whole.output.index_copy_(0, rows, partial.output)
        whole.lse.index_copy_(0, rows, partial.lse)
    else:
        scope.counters.add_pairs(len(rows), q.shape[1], q.shape[2])
        merge_rows_(whole, rows, partial)
    return whole


def _frame(scope: Scope, block: Block, segment: Segment) -> Rotation:
    """The rotation of a block's rows in a segment's frame."""
    return scope.rotation(block.cache, id(segment), block.positions - segment.offset)


def _entries(scope: Scope, q: Tensor, part: EntryPart, kept: Tensor | None) -> Partial:
    """Rows against one segment's entries: all visible ones, or those ``kept`` [t, count]."""
    keys = part.segment.layers[scope.layer].entries[: part.count]
    heads, d = q.shape[1:]
    if kept is None:
        scope.counters.add_pairs(int(part.visible.sum()), heads, d)
        return attend(q.unsqueeze(0), keys.unsqueeze(0), None if part.mask is None else part.mask.unsqueeze(0))
    counts = kept.sum(-1)
    scope.counters.add_pairs(int(counts.sum()), heads, d)
    if part.count <= GATHER_WASTE * int(counts.max()):
        mask = torch.zeros(kept.shape).masked_fill_(~kept, float("-inf"))
        return attend(q.unsqueeze(0), keys.unsqueeze(0), mask.unsqueeze(0))
    indices, mask = kept_indices(kept)
    return attend(q.unsqueeze(1), keys[indices], mask.unsqueeze(1))


def _choose(scope: Scope, p: Projections, q_a: Tensor, block: Block, parts: list[EntryPart]) -> list[Tensor] | None:
    """The entries each row keeps, per segment [t, count]; None when every row keeps all it sees."""
    geometry = scope.geometry
    wanted = scope.capture is not None and scope.capture.wants_scores
    if scope.weights.indexer is None or (not wanted and sum(part.count for part in parts) <= geometry.index_topk):
        return None
    scores = _scores(scope, p, q_a, block, parts)
    if scope.capture is not None and wanted:
        scope.capture.scores(parts, scores)
    kept = keep_best(scores, geometry.index_topk)
    if scope.counters.cuts is not None:
        scope.counters.cuts.append((block.positions, cut_margins(scores, geometry.index_topk)))
    columns = kept.split([part.count for part in parts], dim=1)
    return [chosen[part.row :] for chosen, part in zip(columns, parts, strict=True)]


def _scores(scope: Scope, p: Projections, q_a: Tensor, block: Block, parts: list[EntryPart]) -> Tensor:
    """Indexer scores of a block's rows over all segments' entries side by side, hidden ones -inf: [t, N]."""
    geometry, indexer = scope.geometry, scope.weights.indexer
    assert indexer is not None
    heads, d = geometry.index_heads, geometry.index_head_dim
    q = linear(q_a, indexer.wq_b).view(block.size, heads, d)
    seen = torch.zeros(block.size, dtype=torch.int64)
    turned = q[..., d - geometry.rope_dim :].clone()
    weights = p.index_weights[block.rows] * (d * heads) ** -0.5
    scores = q.new_full((block.size, sum(part.count for part in parts)), float("-inf"))
    column = 0
    for part in parts:
        rotate_from(q, turned, _frame(scope, block, part.segment))
        keys = part.segment.layers[scope.layer].index_keys[: part.count]
        found = index_scores(q[part.row :], keys, weights[part.row :])
        scores[part.row :, column : column + part.count] = found if part.mask is None else found + part.mask
        seen[part.row :] += part.visible
        column += part.count
    every = scope.capture is not None and scope.capture.wants_scores
    scope.counters.add_scores(seen, 0 if every else geometry.index_topk, geometry.q_lora_rank, heads, d)
    return scores
