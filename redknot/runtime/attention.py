"""One layer's attention over a row set: latents and entries written first, then every row reads.

Order inside a layer: all rows leave their latents, complete groups become entries, and only then queries run,
so rows of one forward see each other as the causal masks allow.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from redknot.latents.paged import PagedRows, Places, place
from redknot.latents.segment import Segment
from redknot.latents.session import CompressorTail
from redknot.model.geometry import LayerKind
from redknot.model.weights import CompressorWeights
from redknot.ops.attention import Partial, apply_sink_, attend, attend_chosen, merge_
from redknot.ops.compressor import pool
from redknot.ops.indexer import cut_margins, index_scores, keep_best, keep_lowest
from redknot.ops.norm import rms_norm
from redknot.ops.rope import rotate, rotate_
from redknot.runtime.inplace import attend_in_place, score_in_place
from redknot.runtime.layout import Block, GroupPlan, RowSet, group_plan
from redknot.runtime.model import HeadSlice
from redknot.runtime.reads import Entries, Table
from redknot.runtime.scope import Projections, Scope, once


def write_latents(scope: Scope, p: Projections, rows: RowSet, *, refresh: bool = True) -> None:
    """Store the rows' rotated latents and, with ``refresh``, the entries of the groups they complete."""
    geometry, weights, layer = scope.geometry, scope.weights, scope.layer
    rotation = scope.rotation(rows.cache, "rows", rows.frame_positions)
    latent = rotate(rms_norm(p.latent, weights.kv_norm, geometry.norm_eps), rotation)
    for write in rows.writes:
        into = write.into if isinstance(write.into, slice) else scope.placed(rows.cache, write.into)
        write.segment.layers[layer].window[into] = latent[write.rows]
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
        session.keep_tail(layer, positions, raw, scope.placed(rows.cache, index))
    for session, boundaries in zip(rows.sessions, plan.boundaries, strict=True):
        for at, index, positions in boundaries:
            session.keep_boundary(layer, at, positions, raw, scope.placed(rows.cache, index))


def _rows_plan(scope: Scope, rows: RowSet, tails: list[CompressorTail | None]) -> GroupPlan:
    """The group plan of a row set, made once for all layers of a ratio whose kept tails cover the same positions."""
    positions = [tail.positions if tail is not None else torch.empty(0, dtype=torch.int64) for tail in tails]
    key = ("plan", scope.ratio, tuple(tuple(tail.tolist()) for tail in positions))
    overlap = scope.geometry.kinds[scope.layer] is LayerKind.CSA
    return once(rows.cache, key, lambda: group_plan(rows, scope.ratio, overlap, positions))


def _write_entries(
    scope: Scope, weights: CompressorWeights, rows: RowSet, plan: GroupPlan, raw: tuple[Tensor, ...], kind: str
) -> None:
    """Pool the planned groups of raw (kv, gate) rows and store them."""
    if not len(plan.positions):
        return
    d = weights.norm.shape[0]
    kv, gate = raw
    values, gates = _slots(scope, rows, plan.own, kv, gate)
    gates = gates + weights.ape
    if plan.before.shape[1]:
        before, before_gates = _slots(scope, rows, plan.before, kv[:, :d], gate[:, :d])
        values = torch.cat((before, values[..., d:]), dim=1)
        gates = torch.cat((before_gates + weights.ape[:, :d], gates[..., d:]), dim=1)
    rotation = scope.rotation(rows.cache, id(plan), plan.positions)
    entries = pool(weights, values, gates, rotation, scope.geometry.norm_eps)
    fields = [_paged(segment, scope.layer, kind) for segment, _ in plan.targets]
    _places(rows.cache, plan, fields, [numbers for _, numbers in plan.targets]).write(fields, entries)


def _slots(scope: Scope, rows: RowSet, index: Tensor, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gather raw rows into slots [g, ratio, ...]; an empty slot (-1) has gate -inf."""
    flat = once(rows.cache, ("slots", id(index)), lambda: index.flatten().clamp(min=0))
    values, gates = (raw.index_select(0, scope.placed(rows.cache, flat)).view(*index.shape, -1) for raw in (kv, gate))
    missing = once(rows.cache, ("empty", id(index)), lambda: (index < 0).unsqueeze(-1))
    if bool(missing.any()):  # of the plan, which the host made
        empty = scope.placed(rows.cache, missing)
        values, gates = values.masked_fill(empty, 0.0), gates.masked_fill(empty, float("-inf"))
    return values, gates


def attention(
    scope: Scope,
    p: Projections,
    rows: RowSet,
    heads: HeadSlice,
    into: tuple[Tensor, Tensor] | None = None,
    restored: Tensor | None = None,
) -> Tensor:
    """The grouped, un-rotated, first-projected output Z of some heads: [T, G, R] (this rank's groups).

    ``into`` (Z of more rows, row numbers [T]): the rows of that Z are replaced, and it is returned. ``restored``
    [T, G * R] is what the stored heads give, added to what these give.
    """
    geometry, project = scope.geometry, scope.model.operations.project
    q_a = rms_norm(p.q_a, scope.weights.q_norm, geometry.norm_eps)
    groups = heads.wo_a.shape[0]
    z = q_a.new_empty(rows.size, groups, geometry.o_lora_rank) if into is None else into[0]
    online = scope.capture.global_slice(scope.model, scope.layer) if scope.capture is not None else None
    z_local = torch.empty_like(z) if online is not None else None
    for block in rows.blocks:
        output = _block(scope, p, q_a[block.rows], block, heads).view(block.size, groups, -1, geometry.head_dim)
        mine = None if restored is None else restored[block.rows]
        if into is None:
            project(z[block.rows], output, heads.wo_a, None, mine)
        else:
            project(z, output, heads.wo_a, into[1][block.rows], mine)
        if scope.capture is not None:
            scope.capture.head_outputs(scope.layer, block, output)
        if online is not None and z_local is not None:
            # All heads less the Global ones: those are the fewer, and z stays bit for bit what it is without capture.
            chosen = output[:, torch.arange(groups, device=output.device).unsqueeze(-1), online.positions]
            project(z_local[block.rows], chosen, online.wo_a)
            torch.sub(z[block.rows], z_local[block.rows], out=z_local[block.rows])
    if scope.capture is not None and z_local is not None:
        scope.capture.local(scope.layer, z_local.flatten(1))
    scope.counters.add_product(rows.size, heads.heads * geometry.head_dim, geometry.q_lora_rank + geometry.o_lora_rank)
    return z


def _block(scope: Scope, p: Projections, q_a: Tensor, block: Block, heads: HeadSlice) -> Tensor:
    """Attention output [t, h, d] of one block, rotated back."""
    geometry, d = scope.geometry, scope.geometry.head_dim
    q = linear(q_a, heads.wq).view(block.size, heads.heads, d)
    q = rms_norm(q, None, geometry.norm_eps).mul_(d**-0.5)
    seen = block.entries[scope.ratio] if scope.ratio else None
    chosen = None if seen is None else _choose(scope, p, q_a, block, seen)
    _count_pairs(scope, block, heads.heads, seen, None if chosen is None else chosen[0].shape[1])
    if scope.model.operations.in_place:
        entries = None if seen is None else (seen, *_in_pool(scope, block, seen, "entries"))
        return attend_in_place(scope, q, block, entries, chosen, heads.sinks)
    rotation = scope.rotation(block.cache, "rows", block.positions)
    rotate_(q, rotation)
    whole = _window(scope, q, block)
    if seen is not None:
        merge_(whole, _entries(scope, q, block, seen, chosen))
    rotate_(whole.output, rotation.inverse())
    return apply_sink_(whole, heads.sinks)


def _count_pairs(scope: Scope, block: Block, heads: int, seen: Entries | None, kept: int | None) -> None:
    """Count the keys that a block's rows attend to: windows, entries (at most ``kept`` a row), a merge as one more."""
    pairs = block.near.pairs if scope.model.operations.in_place else block.windows.pairs
    if seen is not None:
        visible = seen.visible if kept is None else seen.visible.clamp(max=kept)
        pairs += int((seen.visible > 0).sum()) + int(visible.sum())
    scope.counters.add_pairs(pairs, heads, scope.geometry.head_dim)


def _read_windows(scope: Scope, block: Block, table: Table) -> Tensor:
    """Window latents of a table in the request's frame: [N, d].

    Turning the queries to each segment's frame is the same product. Here the keys are turned, in a copy: a block has
    more queries (rows x heads) than it has keys, and all segments then share one softmax.
    """
    parts = []
    for segment, rows in table.parts:
        mine = rows if isinstance(rows, slice) else scope.placed(block.cache, rows)
        parts.append(segment.layers[scope.layer].window[mine])
    if table.shifts is None:
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    return _turned(scope, block, table, torch.cat(parts))


def _read_entries(scope: Scope, block: Block, seen: Entries, kind: str) -> Tensor:
    """As windows, of the "entries" or "index_keys" that the block's rows may see: [N, width], always a copy."""
    fields, places = _fields(scope, block, seen, kind)
    return _turned(scope, block, seen.table, places.read(fields))


def _in_pool(scope: Scope, block: Block, seen: Entries, kind: str) -> tuple[Tensor, Tensor]:
    """The same where they lie: all rows of their pool [M, width], and which of those they are [N]."""
    fields, places = _fields(scope, block, seen, kind)
    return fields[0].pool.rows, places.at(fields)


def _fields(scope: Scope, block: Block, seen: Entries, kind: str) -> tuple[list[PagedRows], Places]:
    fields = [_paged(segment, scope.layer, kind) for segment, _ in seen.parts]
    return fields, _places(block.cache, seen, fields, [torch.arange(count) for _, count in seen.parts])


def _turned(scope: Scope, block: Block, table: Table, keys: Tensor) -> Tensor:
    """A table's ``keys`` [N, width], turned in place to the request's frame."""
    if table.shifts is not None:
        rotate_(keys, scope.rotation(block.cache, id(table), table.shifts))
    return keys


def _places(cache: dict[object, object], owner: object, fields: list[PagedRows], rows: list[Tensor]) -> Places:
    """Where rows of paged fields lie, worked out once per ``owner`` for all layers of a ratio."""
    return once(cache, ("places", id(owner)), lambda: place(fields, rows))


def _paged(segment: Segment, layer: int, kind: str) -> PagedRows:
    """The "entries" or "index_keys" of a layer that has them."""
    rows = getattr(segment.layers[layer], kind)
    assert isinstance(rows, PagedRows)
    return rows


def _window(scope: Scope, q: Tensor, block: Block) -> Partial:
    """The block's rows against their windows."""
    seen, cache = block.windows, block.cache
    n, m, k = seen.mask.shape
    keys = _read_windows(scope, block, seen.table).index_select(0, scope.placed(cache, seen.keys)).view(n, k, -1)
    tiles = q if seen.rows is None else q.index_select(0, scope.placed(cache, seen.rows))
    partial = attend(tiles.view(n, m, *q.shape[1:]), keys, scope.placed(cache, seen.mask))
    if seen.take is None:
        return partial
    take = scope.placed(cache, seen.take)
    return Partial(partial.output.index_select(0, take), partial.lse.index_select(0, take))


def _entries(scope: Scope, q: Tensor, block: Block, seen: Entries, chosen: tuple[Tensor, Tensor] | None) -> Partial:
    """The block's rows against the entries they keep."""
    keys = _read_entries(scope, block, seen, "entries")
    if chosen is not None:
        return attend_chosen(q, keys, *chosen)
    mask = None if seen.mask is None else scope.placed(block.cache, seen.mask).unsqueeze(0)
    return attend(q.unsqueeze(0), keys.unsqueeze(0), mask)


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
    keep = keep_lowest if scope.model.operations.in_place else keep_best
    return keep(scores, topk) if seen.count > topk else None


def _scores(scope: Scope, p: Projections, q_a: Tensor, block: Block, seen: Entries) -> Tensor:
    """Indexer scores of a block's rows over all segments' entries side by side, hidden ones -inf: [t, N]."""
    geometry, indexer = scope.geometry, scope.weights.indexer
    assert indexer is not None
    heads, d = geometry.index_heads, geometry.index_head_dim
    q = linear(q_a, indexer.wq_b).view(block.size, heads, d)
    weights = p.index_weights[block.rows] * (d * heads) ** -0.5
    every = scope.capture is not None and scope.capture.wants_scores
    scope.counters.add_scores(seen.visible, 0 if every else geometry.index_topk, geometry.q_lora_rank, heads, d)
    if scope.model.operations.in_place:
        return score_in_place(scope, q, block, (seen, *_in_pool(scope, block, seen, "index_keys")), weights)
    rotate_(q, scope.rotation(block.cache, "rows", block.positions))
    scores = index_scores(q, _read_entries(scope, block, seen, "index_keys"), weights)
    return scores if seen.mask is None else scores.add_(scope.placed(block.cache, seen.mask))
