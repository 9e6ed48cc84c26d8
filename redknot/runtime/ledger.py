"""Four ledgers of what reuse saved, from executed counters; each has its own unit, so they are never added.

Recompute is a native dense prefill with the same pruning: in the last layer only the last row runs attention and
experts. What the pruning drops is dropped in both arms, so it is nobody's saving: a dense run saves exactly 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redknot.comm.shard import SINGLE, Shard
from redknot.model.geometry import Geometry, LayerKind
from redknot.model.policy import Treatment
from redknot.model.profile import Profile
from redknot.plan.rows import Rows
from redknot.plan.worth import skipped_layers
from redknot.runtime.counters import Counters


@dataclass(frozen=True)
class Saving:
    """``saved`` of ``whole`` units were not run; ``saved`` is below 0 when reuse cost more than it saved."""

    saved: int
    whole: int

    @property
    def share(self) -> float:
        """The saved part, 0 of nothing."""
        return self.saved / self.whole if self.whole else 0.0

    def to_dict(self) -> dict[str, int | float]:
        """Plain JSON values."""
        return {"share": self.share, "saved": self.saved, "whole": self.whole}


@dataclass(frozen=True)
class Ledgers:
    """What one prefill saved against recompute.

    ``head_rows``: Local head-rows of middle layers that recompute runs and this prefill did not, of L * T * H. The
    rows of GLOBAL+Z and skipped rows alike; a skipped row's Global heads are left out, and so is everything in the
    fences, where no head is Local. It therefore never exceeds :func:`structural_ceiling`.
    ``token_rows``: row-layers that recompute runs and this prefill did not, of L * T, fences included.
    ``arithmetic``: FLOPs saved, of :func:`recompute_flops`; probe, repair and merges are in the FLOPs that ran.
    ``wall_clock``: seconds by timer.
    """

    head_rows: Saving
    token_rows: Saving
    arithmetic: Saving
    wall_clock: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, one namespace a ledger."""
        shares = {"head_rows": self.head_rows, "token_rows": self.token_rows, "arithmetic": self.arithmetic}
        return {name: saving.to_dict() for name, saving in shares.items()} | {"wall_clock": dict(self.wall_clock)}


@dataclass(frozen=True)
class Bounds:
    """What skipping rows and heads alone can give, from the rows that ran and the profile; savings are in ``Ledgers``.

    ``row_bound``: the speed-up from rows that were skipped, see :func:`row_bound`; 1 where the profile skips none.
    ``head_row_ceiling``: the share of ``Ledgers.head_rows``, see :func:`structural_ceiling`.
    """

    row_bound: float
    head_row_ceiling: float

    def __str__(self) -> str:
        """The form printed beside a result."""
        return f"row bound {self.row_bound:.1f}x, head-row ceiling {self.head_row_ceiling:.1%}"


def bounds(geometry: Geometry, profile: Profile, rows: Rows) -> Bounds:
    """The bounds of a prefill that ran these row classes under a profile that reuses."""
    protected, active = int(rows.protected.sum()), int(rows.active.sum())
    return Bounds(row_bound(geometry, profile, rows.total, protected, active), structural_ceiling(geometry, profile))


def ledgers(
    geometry: Geometry,
    profile: Profile,
    tokens: int,
    counters: Counters,
    wall: Mapping[str, float],
    shard: Shard = SINGLE,
    cached: int = 0,
) -> Ledgers:
    """The ledgers of a prefill of ``tokens`` tokens that ``counters`` (of rank ``shard``, without decode) saw.

    The first ``cached`` tokens came from a prefix cache: neither arm runs them, so that they are nobody's saving.

    Of a dense run any profile gives zeros. Rows are the same on every rank; FLOPs are this rank's.
    """
    layers, heads = geometry.num_layers, geometry.num_heads
    skipped = recompute_row_layers(geometry, tokens - cached) - counters.row_layers
    middle, missing = skipped_layers(geometry, profile)
    # Every skipped row is missing from the same layers, so the middle's part of them is a fixed fraction. What ran
    # again for window rows comes off the middle, where some of it ran.
    again = counters.window_row_layers
    in_middle = (skipped + again) * middle // missing - again if missing else 0
    local = heads - profile.global_per_group * geometry.o_groups
    flops = recompute_flops(geometry, tokens, shard, cached)
    ran = tokens - cached
    return Ledgers(
        head_rows=Saving(local * (in_middle + counters.split_row_layers), layers * ran * heads),
        token_rows=Saving(skipped, layers * ran),
        arithmetic=Saving(flops - counters.flops, flops),
        wall_clock=dict(wall),
    )


def structural_ceiling(geometry: Geometry, profile: Profile) -> float:
    """The share of head-rows that are Local and in a middle layer: what ``head_rows`` cannot exceed."""
    if not profile.reuses:
        return 0.0
    middle = max(geometry.num_layers - 2 * profile.fence_layers, 0)
    return middle / geometry.num_layers * (1 - profile.global_per_group / geometry.heads_per_group)


def row_bound(geometry: Geometry, profile: Profile, total: int, protected: int, active: int = 0) -> float:
    """How many times fewer row-layers than recompute a profile runs: the speed-up if rows were all that costs.

    ``total`` rows of which ``protected`` and ``active`` (the numbers of rows) run everywhere. It bounds what skipping
    rows gives; dropped heads and experts may come on top, the cost of rows that only leave latents comes off, and so
    does a probe, whose rows run again: what it costs is in the FLOPs of ``Ledgers.arithmetic``.
    """
    recompute = recompute_row_layers(geometry, total)
    if profile.middle_idle is not Treatment.SKIP:
        return 1.0
    _, missing = skipped_layers(geometry, profile)
    return recompute / (recompute - (total - protected - active) * missing)


def recompute_row_layers(geometry: Geometry, tokens: int) -> int:
    """Row-layers of a native dense prefill: every row in every layer but the last, where the last row runs alone."""
    return (geometry.num_layers - 1) * tokens + min(tokens, 1)


def recompute_flops(geometry: Geometry, tokens: int, shard: Shard = SINGLE, cached: int = 0) -> int:
    """FLOPs that ``Counters.flops`` shows after a native dense prefill of ``tokens`` tokens, in closed form.

    Of these the first ``cached`` are there already, so that only the rows behind them run.

    What counts: matrix products of rows that run, attention over visible pairs, indexer products of rows that see
    more entries than they may keep, one key's worth for each merge of two parts. Elementwise work does not.
    With several ranks, which routed experts a rank runs depends on the text: an even share is taken, so the sum
    over ranks is what counts to rounding.
    """
    ran = tokens - cached
    rows = min(ran, 1)
    total = sum(
        count * _layer_flops(geometry, kind, shard, tokens, ran, ran)
        for kind, count in Counter(geometry.kinds[:-1]).items()
    )
    total += _layer_flops(geometry, geometry.kinds[-1], shard, tokens, ran, rows)
    hc, hidden = geometry.hc_mult, geometry.hidden_size
    return total + 2 * rows * hidden * (hc * (hc + 1) + geometry.vocab_size)


def _layer_flops(geometry: Geometry, kind: LayerKind, shard: Shard, tokens: int, ran: int, rows: int) -> int:
    """One layer over the last ``ran`` of ``tokens`` rows, of which the last ``rows`` go on to attention and experts."""
    g, hc, hidden = geometry, geometry.hc_mult, geometry.hidden_size
    groups = _own(shard, g.o_groups)
    heads = groups * g.heads_per_group
    flops = 2 * ran * hidden * _input_width(g, kind)
    flops += 2 * rows * heads * g.head_dim * (g.q_lora_rank + g.o_lora_rank)
    flops += 2 * rows * groups * g.o_lora_rank * hidden
    flops += 4 * heads * g.head_dim * _attended(g, kind, tokens, rows)
    if kind is LayerKind.CSA:
        choosing, scored = _scored(g, tokens, rows)
        flops += 2 * g.index_heads * (choosing * g.q_lora_rank * g.index_head_dim + scored * (g.index_head_dim + 1))
    flops += 2 * hc * hidden * ((ran + rows) * (hc * (hc + 2) + 1) + 2 * rows * (hc + 1))
    flops += 2 * rows * hidden * g.num_experts
    flops += 6 * rows * hidden * _own(shard, g.expert_width * g.num_shared_experts)
    routed = 6 * rows * g.experts_per_token * hidden * g.expert_width
    return flops + routed * _own(shard, g.num_experts) // g.num_experts


def _own(shard: Shard, total: int) -> int:
    """How many of ``total`` a rank holds."""
    part = shard.part(total)
    return int(part.stop - part.start)


def _input_width(geometry: Geometry, kind: LayerKind) -> int:
    """Columns of a layer's input projection (``AttentionWeights.in_sizes``)."""
    width = geometry.head_dim + geometry.q_lora_rank
    if kind is LayerKind.CSA:
        return width + 4 * (geometry.head_dim + geometry.index_head_dim) + geometry.index_heads
    return width + (2 * geometry.head_dim if kind is LayerKind.HCA else 0)


def _attended(geometry: Geometry, kind: LayerKind, tokens: int, rows: int) -> int:
    """Keys that the last ``rows`` rows attend to, and one more for each row that merges entries with its window."""

    def up_to(n: int) -> int:
        inside = min(n, geometry.window)
        keys = inside * (inside + 1) // 2 + (n - inside) * geometry.window
        if kind is LayerKind.SLIDING:
            return keys
        ratio = geometry.csa_ratio if kind is LayerKind.CSA else geometry.hca_ratio
        few = n if kind is LayerKind.HCA else min(n, geometry.index_topk * ratio - 1)
        return keys + _visible(few, ratio) + (n - few) * geometry.index_topk + max(n - ratio + 1, 0)

    return up_to(tokens) - up_to(tokens - rows)


def _scored(geometry: Geometry, tokens: int, rows: int) -> tuple[int, int]:
    """Of the last ``rows`` rows, those that see more entries than they may keep, and how many these see."""
    few = (geometry.index_topk + 1) * geometry.csa_ratio - 1  # rows that see no more than they may keep

    def up_to(n: int) -> tuple[int, int]:
        settled = min(n, few)
        return n - settled, _visible(n, geometry.csa_ratio) - _visible(settled, geometry.csa_ratio)

    (choosing, scored), (before, scored_before) = up_to(tokens), up_to(tokens - rows)
    return choosing - before, scored - scored_before


def _visible(n: int, ratio: int) -> int:
    """Entries that the first ``n`` rows see in all: the sum of p // ratio over p in 1..n."""
    whole, rest = divmod(n, ratio)
    return ratio * whole * (whole - 1) // 2 + whole * (rest + 1)
