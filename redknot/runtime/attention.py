"""One layer's attention over a row set: latents and entries written first, then every row reads.

Order inside a layer: all rows leave their latents, complete groups become entries, and only then queries run,
so rows of one forward see each other as the causal masks allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from redknot.latents.paged import PagedRows, Places, place
from redknot.latents.segment import Segment
from redknot.latents.session import CompressorTail
from redknot.model.geometry import Geometry, LayerKind
from redknot.model.weights import AttentionWeights, CompressorWeights
from redknot.ops.attention import Partial, apply_sink_, attend, attend_chosen, merge_
from redknot.ops.compressor import pool
from redknot.ops.indexer import cut_margins, index_scores, keep_best
from redknot.ops.norm import rms_norm
from redknot.ops.rope import Rotation, rotate, rotate_, rotation_at
from redknot.runtime.capture import Capture
from redknot.runtime.counters import Counters
from redknot.runtime.layout import Block, GroupPlan, RowSet, group_plan
from redknot.runtime.model import HeadSlice, Model
from redknot.runtime.reads import Entries, Table


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


def write_latents(scope: Scope, p: Projections, rows: RowSet, *, refresh: bool = True) -> None:
    """Store the rows' rotated latents and, with ``refresh``, the entries of the groups they complete."""
    geometry, weights, layer = scope.geometry, scope.weights, scope.layer
    rotation = scope.rotation(rows.cache, "rows", rows.frame_positions)
    latent = rotate(rms_norm(p.latent, weights.kv_norm, geometry.norm_eps), rotation)
    for write in rows.writes:
        write.segment.layers[layer].window[write.into] = latent[write.rows]
    if weights.compressor is None or not refresh:
        return
    tails = [session.tails.get(layer) for session in rows.sessions]
    plan = _rows_plan(scope, rows, tails)
    fresh = (p.comp_kv, p.comp_gate, p.index_kv, p.index_gate)
    kept = [tail.raw for tail in tails if tail is not None]
    raw = tuple(torch.cat((*(old[i] for old in kept), new)) for i, new in enumerate(fresh))
    _write_entries(scope, weights.compressor, rows, plan, raw[:2], "entries")
    if weights.indexer is not None:
        _write_entries(scope, weights.indexer.compressor, rows, plan, raw[2:], "index_keys")
    scope.counters.entries_refreshed += len(plan.positions)
    for session, (index, positions) in zip(rows.sessions, plan.tails, strict=True):
        session.keep_tail(layer, positions, raw, index)
    for session, boundaries in zip(rows.sessions, plan.boundaries, strict=True):
        for at, index, positions in boundaries:
            session.keep_boundary(layer, at, positions, raw, index)


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
    scope: Scope, weights: CompressorWeights, rows: RowSet, plan: GroupPlan, raw: tuple[Tensor, ...], kind: str
) -> None:
    """Pool the planned groups of raw (kv, gate) rows and store them."""
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
    fields = [_paged(segment, scope.layer, kind) for segment, _ in plan.targets]
    _places(rows.cache, plan, fields, [numbers for _, numbers in plan.targets]).write(fields, entries)


def _slots(index: Tensor, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gather raw rows into slots [g, ratio, ...]; an empty slot (-1) has gate -inf."""
    flat = index.flatten().clamp(min=0)
    values, gates = (raw.index_select(0, flat).view(*index.shape, -1) for raw in (kv, gate))
    if bool((index < 0).any()):
        empty = (index < 0).unsqueeze(-1)
        values, gates = values.masked_fill(empty, 0.0), gates.masked_fill(empty, float("-inf"))
    return values, gates


def attention(scope: Scope, p: Projections, rows: RowSet, heads: HeadSlice) -> Tensor:
    """The grouped, un-rotated, first-projected output Z of some heads: [T, G * R] (this rank's groups)."""
    geometry = scope.geometry
    q_a = rms_norm(p.q_a, scope.weights.q_norm, geometry.norm_eps)
    groups = heads.wo_a.shape[0]
    z = torch.empty(rows.size, groups, geometry.o_lora_rank)
    online = scope.capture.global_slice(scope.model, scope.layer) if scope.capture is not None else None
    z_local = torch.empty_like(z) if online is not None else None
    for block in rows.blocks:
        output = _block(scope, p, q_a[block.rows], block, heads).view(block.size, groups, -1, geometry.head_dim)
        z[block.rows] = _project_out(output, heads)
        if scope.capture is not None:
            scope.capture.head_outputs(scope.layer, block, output)
        if online is not None and z_local is not None:
            # All heads less the Global ones: those are the fewer, and z stays bit for bit what it is without capture.
            chosen = output[:, torch.arange(groups).unsqueeze(-1), online.positions]
            z_global = _project_out(chosen, online)
            torch.sub(z[block.rows], z_global, out=z_local[block.rows])
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
    rotation = scope.rotation(block.cache, "rows", block.positions)
    q = linear(q_a, heads.wq).view(block.size, heads.heads, d)
    q = rms_norm(q, None, geometry.norm_eps).mul_(d**-0.5)
    rotate_(q, rotation)
    whole = _window(scope, q, block)
    if scope.ratio and (seen := block.entries[scope.ratio]) is not None:
        scope.counters.add_pairs(int((seen.visible > 0).sum()), heads.heads, d)  # a merge costs as much as one more key
        merge_(whole, _entries(scope, p, q, q_a, block, seen))
    rotate_(whole.output, rotation.inverse())
    return apply_sink_(whole, heads.sinks)


def _read_windows(scope: Scope, block: Block, table: Table) -> Tensor:
    """Window latents of a table in the request's frame: [N, d].

    Turning the queries to each segment's frame is the same product. Here the keys are turned, in a copy: a block has
    more queries (rows x heads) than it has keys, and all segments then share one softmax.
    """
    parts = [segment.layers[scope.layer].window[rows] for segment, rows in table.parts]
    if table.shifts is None:
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    return _turned(scope, block, table, torch.cat(parts))


def _read_entries(scope: Scope, block: Block, seen: Entries, kind: str) -> Tensor:
    """As windows, of the "entries" or "index_keys" that the block's rows may see: [N, width], always a copy."""
    fields = [_paged(segment, scope.layer, kind) for segment, _ in seen.parts]
    places = _places(block.cache, seen, fields, [torch.arange(count) for _, count in seen.parts])
    return _turned(scope, block, seen.table, places.read(fields))


def _turned(scope: Scope, block: Block, table: Table, keys: Tensor) -> Tensor:
    """A table's ``keys`` [N, width], turned in place to the request's frame."""
    if table.shifts is not None:
        rotate_(keys, scope.rotation(block.cache, id(table), table.shifts))
    return keys


def _places(cache: dict[object, object], owner: object, fields: list[PagedRows], rows: list[Tensor]) -> Places:
    """Where rows of paged fields lie, worked out once per ``owner`` for all layers of a ratio."""
    key = ("places", id(owner))
    if key not in cache:
        cache[key] = place(fields, rows)
    places = cache[key]
    assert isinstance(places, Places)
    return places


def _paged(segment: Segment, layer: int, kind: str) -> PagedRows:
    """The "entries" or "index_keys" of a layer that has them."""
    rows = getattr(segment.layers[layer], kind)
    assert isinstance(rows, PagedRows)
    return rows


def _window(scope: Scope, q: Tensor, block: Block) -> Partial:
    """The block's rows against their windows."""
    seen = block.windows
    n, m, k = seen.mask.shape
    keys = _read_windows(scope, block, seen.table).index_select(0, seen.keys).view(n, k, -1)
    tiles = q if seen.rows is None else q.index_select(0, seen.rows)
    partial = attend(tiles.view(n, m, *q.shape[1:]), keys, seen.mask)
    scope.counters.add_pairs(seen.pairs, q.shape[1], q.shape[2])
    if seen.take is None:
        return partial
    return Partial(partial.output.index_select(0, seen.take), partial.lse.index_select(0, seen.take))


def _entries(scope: Scope, p: Projections, q: Tensor, q_a: Tensor, block: Block, seen: Entries) -> Partial:
    """The block's rows against the entries they keep."""
    keys = _read_entries(scope, block, seen, "entries")
    chosen = _choose(scope, p, q_a, block, seen)
    heads, d = q.shape[1:]
    if chosen is None:
        scope.counters.add_pairs(int(seen.visible.sum()), heads, d)
        return attend(q.unsqueeze(0), keys.unsqueeze(0), None if seen.mask is None else seen.mask.unsqueeze(0))
    indices, mask = chosen
    scope.counters.add_pairs(int(seen.visible.clamp(max=indices.shape[1]).sum()), heads, d)
    return attend_chosen(q, keys, indices, mask)


def _choose(scope: Scope, p: Projections, q_a: Tensor, block: Block, seen: Entries) -> tuple[Tensor, Tensor] | None:
    """The entries each row keeps as (indices, additive mask) [t, topk]; None when every row keeps all it sees."""
    topk = scope.geometry.index_topk
    wanted = scope.capture is not None and scope.capture.wants_scores
    if scope.weights.indexer is None or (not wanted and seen.count <= topk):
        return None
    scores = _scores(scope, p, q_a, block, seen)
    if scope.capture is not None and wanted:
        scope.capture.scores(seen, scores)
    if scope.counters.cuts is not None:
        scope.counters.cuts.append((block.positions, cut_margins(scores, topk)))
    return keep_best(scores, topk) if seen.count > topk else None


def _scores(scope: Scope, p: Projections, q_a: Tensor, block: Block, seen: Entries) -> Tensor:
    """Indexer scores of a block's rows over all segments' entries side by side, hidden ones -inf: [t, N]."""
    geometry, indexer = scope.geometry, scope.weights.indexer
    assert indexer is not None
    heads, d = geometry.index_heads, geometry.index_head_dim
    q = linear(q_a, indexer.wq_b).view(block.size, heads, d)
    rotate_(q, scope.rotation(block.cache, "rows", block.positions))
    weights = p.index_weights[block.rows] * (d * heads) ** -0.5
    scores = index_scores(q, _read_entries(scope, block, seen, "index_keys"), weights)
    every = scope.capture is not None and scope.capture.wants_scores
    scope.counters.add_scores(seen.visible, 0 if every else geometry.index_topk, geometry.q_lora_rank, heads, d)
    return scores if seen.mask is None else scores.add_(seen.mask)
