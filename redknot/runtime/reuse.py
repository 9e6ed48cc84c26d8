"""Reuse: the choice of the rows that run over a restored session, and the stages that a profile runs.

Rows that do not run are read from the segments that artifacts filled. Rows that run leave fresh latents over the
stored ones; the stored bytes themselves are never written to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from redknot.artifact.schema import boundary_section, shard_section
from redknot.device import on_device
from redknot.latents.session import Session
from redknot.latents.workspace import Workspace
from redknot.model.geometry import Geometry
from redknot.model.policy import Policy, Selector, Treatment
from redknot.ops.moe import FanOut
from redknot.plan.rows import KnownRun, Rows, pick_rows, protected_rows
from redknot.runtime.capture import Capture
from redknot.runtime.counters import Counters
from redknot.runtime.forward import HeadSplit, Stage, forward
from redknot.runtime.layout import RowSet
from redknot.runtime.model import Model
from redknot.runtime.prefill import CHUNK_ROWS
from redknot.runtime.ranking import rank_by_deviation, rank_by_indexer
from redknot.runtime.restore import Source, segmented_session


def choose_rows(
    model: Model, session: Session, runs: list[KnownRun], token_ids: Tensor, profile: Policy, counters: Counters
) -> Rows:
    """Row classes of a request; probes the latents when the profile picks rows by them."""
    geometry, total = model.geometry, session.length
    group = geometry.csa_ratio
    protected = protected_rows(total, runs, profile, geometry.window, group)
    if not profile.picks_rows or not runs:
        return Rows(total, protected, torch.zeros_like(protected))
    if profile.selector is Selector.DEVIATION:
        with Workspace(session.memory_space()) as memory:
            scratch = segmented_session(memory, runs, total, room=0)
            ranking = rank_by_deviation(model, session, scratch, runs, token_ids, profile.deviation_layer, counters)
    else:
        ranking = rank_by_indexer(model, session, runs, token_ids, counters)
    session.require(geometry.num_layers - 1)  # before rows leave anything of their own over what was restored
    return pick_rows(total, runs, protected, ranking, profile, group, geometry.index_topk)


def written_early(total: int, runs: Sequence[KnownRun], profile: Policy, geometry: Geometry) -> Tensor:
    """Rows that may run before all layers of the known segments are filled, as a mask [total].

    None where rows are picked: that takes all layers.
    """
    if profile.picks_rows:
        return torch.zeros(total, dtype=torch.bool)
    protected = protected_rows(total, runs, profile, geometry.window, geometry.csa_ratio)
    in_fences, in_middle = _where(profile, protected)
    return in_fences | in_middle


def _where(profile: Policy, running: Tensor) -> tuple[Tensor, Tensor]:
    """Of all rows, those that run in the fences and those in the middle, if ``running`` run everywhere: masks [n]."""
    everywhere = torch.ones_like(running)
    fences = profile.fence_layers > 0 and profile.fence_idle is Treatment.FULL
    return everywhere if fences else running, running if profile.middle_idle is Treatment.SKIP else everywhere


@torch.inference_mode()
def prefill_reusing(
    model: Model,
    session: Session,
    sources: Sequence[Source],
    rows: Rows,
    token_ids: Tensor,
    profile: Policy,
    counters: Counters,
    chunk: int = CHUNK_ROWS,
) -> Tensor:
    """Run what a profile runs over a restored session; returns the last row's logits [vocab].

    PoolFullError, before anything runs, unless every shared block in which rows run could be copied.
    """
    return run_stages(Stages(model, session, sources, rows, token_ids, profile), counters, chunk)[-1]


@torch.inference_mode()
def run_stages(stages: Stages, counters: Counters, chunk: int = CHUNK_ROWS, capture: Capture | None = None) -> Tensor:
    """Run a whole request in chunks; returns the logits of its ``stages.last`` rows, [last, vocab]. Errors as above."""
    require_copies(stages.session, stages.anywhere)
    logits = []
    for lo, hi in pairwise(stages.edges(chunk)):
        logits.append(forward(stages.model, stages.of(lo, hi), counters, capture))
    return torch.cat(logits)


def require_copies(session: Session, running: Tensor) -> None:
    """PoolFullError unless the store has room for copies of all shared blocks in which rows ``running`` [n] lie."""
    copies, space = 0, session.memory_space()
    for segment in session.segments:
        if segment.blocks is not None:
            rows = running[segment.first : segment.stop].nonzero().flatten()
            copies += segment.blocks.shared((rows // space.layout.block_tokens).tolist())
    space.require(copies)


class Stages:
    """The stages of one request, chunk by chunk; the logits of its ``last`` rows, which all run, count."""

    def __init__(
        self,
        model: Model,
        session: Session,
        sources: Sequence[Source],
        rows: Rows,
        token_ids: Tensor,
        profile: Policy,
        last: int = 1,
    ) -> None:
        self.last = last
        self.model, self.session, self.sources = model, session, sources
        self.token_ids, self.profile, self.rows = token_ids, profile, rows
        self.in_fences, self.in_middle = _where(profile, rows.running)
        split = torch.zeros_like(rows.protected)
        if profile.middle_active is Treatment.GLOBAL_Z:
            split |= rows.active
        if profile.middle_idle is Treatment.GLOBAL_Z:
            split |= ~rows.running
        self.split = split

    @property
    def anywhere(self) -> Tensor:
        """Rows that run in some layer, a mask [total]."""
        return self.in_fences | self.in_middle

    def edges(self, chunk: int) -> list[int]:
        """Cut the request into chunks of ``chunk`` rows a layer, averaged over the layers.

        Cut by the rows of the fences alone, a chunk would hold only a few rows of the layers in between.
        """
        layers, fences = self.model.geometry.num_layers, 2 * self.profile.fence_layers
        weight = (fences * self.in_fences.long() + (layers - fences) * self.in_middle.long()).cumsum(0)
        full = torch.arange(1, int(weight[-1]) // (chunk * layers) + 1) * chunk * layers
        inner = (torch.searchsorted(weight, full) + 1).tolist()
        return sorted({0, *inner, self.rows.total})

    def of(self, lo: int, hi: int) -> list[Stage]:
        """The stages of request positions [lo, hi)."""
        layers, fence = self.model.geometry.num_layers, self.profile.fence_layers
        spans = [(range(0, fence), self.in_fences), (range(fence, layers - fence), self.in_middle)]
        spans.append((range(layers - fence, layers), self.in_fences))
        spans = [(span, mask) for span, mask in spans if len(span)]
        positions = [(lo + mask[lo:hi].nonzero().flatten()) for _, mask in spans]
        stages = []
        for number, (span, _) in enumerate(spans):
            mine = positions[number]
            if number + 1 < len(spans):
                go_on = torch.isin(mine, positions[number + 1]).nonzero().flatten()
            else:
                go_on = (mine >= self.rows.total - self.last).nonzero().flatten()
            middle = span.start >= fence and span.stop <= layers - fence
            stages.append(
                Stage(
                    span,
                    RowSet(self.model.geometry, (self.session,), (mine,)),
                    self.token_ids[mine],
                    go_on,
                    fan_out=self._fan_out() if middle else None,
                    split=self._head_split(mine) if middle else None,
                    restored=self._restored(mine, positions[number - 1]) if number else None,
                )
            )
        return stages

    def _fan_out(self) -> FanOut | None:
        policy = self.profile.fan_out
        return None if policy is None else FanOut(policy.k_min, policy.tau)

    def _restored(self, mine: Tensor, before: Tensor) -> tuple[Tensor, Callable[[], Tensor]] | None:
        """Rows that did not run in the stage before, with their stored streams."""
        entering = (~torch.isin(mine, before)).nonzero().flatten()
        if not len(entering):
            return None
        shape = (self.model.geometry.hc_mult, self.model.geometry.hidden_size)
        wanted = mine[entering]
        return entering, lambda: self._gather(wanted, boundary_section("streams")).float().unflatten(-1, shape)

    def _head_split(self, mine: Tensor) -> HeadSplit | None:
        rows = self.split[mine].nonzero().flatten()
        if not len(rows):
            return None
        shard, wanted = self.model.group.shard, mine[rows]

        def restored(layer: int) -> Tensor:
            return self._gather(wanted, shard_section(layer, "zl", shard.rank, shard.world)).float()

        return HeadSplit(self.profile.heads(self.model.geometry), rows, restored)

    def _gather(self, positions: Tensor, name: str) -> Tensor:
        """Stored rows of a section at request positions, all of which lie in known runs, on the model's device."""
        parts = []
        for source in self.sources:
            inside = positions[(positions >= source.run.start) & (positions < source.run.stop)]
            if len(inside):
                parts.append(source.sections.section(name)[inside - source.run.start + source.run.doc_start])
        return on_device(torch.cat(parts), self.model.device)
