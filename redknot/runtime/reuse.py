"""Reuse: a session whose documents come from artifacts, the choice of rows, and the stages a profile runs.

Rows that do not run are read from the segments that artifacts filled. Rows that run leave fresh latents over the
stored ones; the stored bytes themselves are never written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from redknot.artifact.schema import boundary_section, layer_section, shard_section
from redknot.latents.paged import PagedRows
from redknot.latents.segment import Segment
from redknot.latents.session import Session
from redknot.latents.workspace import Workspace
from redknot.model.profile import Profile, Selector, Treatment
from redknot.ops.moe import FanOut
from redknot.plan.rows import KnownRun, Rows, pick_rows, protected_rows
from redknot.plan.windows import Rebuild
from redknot.runtime.counters import Counters
from redknot.runtime.forward import HeadSplit, Stage, forward
from redknot.runtime.layout import RowSet
from redknot.runtime.model import Model
from redknot.runtime.prefill import CHUNK_ROWS
from redknot.runtime.ranking import rank_by_deviation, rank_by_indexer


class Sections(Protocol):
    """What reuse reads of an artifact; ``redknot.artifact.loaded.LoadedArtifact`` is one."""

    def section(self, name: str) -> Tensor:
        """One stored tensor; raises StoreError when it cannot be trusted."""


@dataclass(frozen=True)
class Source:
    """A known run and the artifact it is read from."""

    run: KnownRun
    sections: Sections
    key: bytes | None = None  # names the content of ``sections``; None: its blocks are not shared with anybody
    rebuild: Rebuild | None = None  # None: the artifact keeps the window rows that are read


def segmented(runs: Sequence[KnownRun], total: int) -> list[tuple[int, int, KnownRun | None]]:
    """Cut a request into known runs and the new text between them: (start, stop, run or None) in order."""
    pieces: list[tuple[int, int, KnownRun | None]] = []
    at = 0
    for run in runs:
        if run.start > at:
            pieces.append((at, run.start, None))
        pieces.append((run.start, run.stop, run))
        at = run.stop
    if at < total:
        pieces.append((at, total, None))
    return pieces


def segmented_session(memory: Workspace, runs: Sequence[KnownRun], total: int, room: int) -> Session:
    """An empty session cut at the known runs, with room for ``room`` generated tokens.

    Every segment but the last is closed. The last one is new text, or begins behind a known run that ends the request;
    without room there is none behind it. PoolFullError or ArenaFullError where the store has no room for all of it.
    """
    segments = []
    for segment, _, capacity in _cut(runs, total, room):
        memory.allocate(segment, capacity)
        segments.append(segment)
    return memory.session(segments)


@torch.inference_mode()
def restored_session(memory: Workspace, sources: Sequence[Source], total: int, room: int) -> Session:
    """As ``segmented_session``, its known segments filled from their artifacts: all but windows to be rebuilt.

    Blocks that the store has under an artifact's key are shared as they are; others are filled and can be found from
    then on. StoreError for a section that cannot be trusted.
    """
    by_start, segments = {source.run.start: source for source in sources}, []
    for segment, run, capacity in _cut([source.run for source in sources], total, room):
        if run is None:
            memory.allocate(segment, capacity)
        else:
            _restore(memory, segment, by_start[run.start])
        segments.append(segment)
    return memory.session(segments)


def _cut(runs: Sequence[KnownRun], total: int, room: int) -> list[tuple[Segment, KnownRun | None, int]]:
    """The segments of a request without memory, their runs, and the tokens that each must have room for."""
    pieces = segmented(runs, total)
    if room and pieces and pieces[-1][2] is not None:
        pieces.append((total, total, None))
    cut = []
    for number, (start, stop, run) in enumerate(pieces):
        first = run.doc_start if run is not None else 0
        last = number + 1 == len(pieces) and run is None
        segment = Segment(start - first, first, first + stop - start, closed=not last)
        cut.append((segment, run, segment.length + (room if last else 0)))
    return cut


def _restore(memory: Workspace, segment: Segment, source: Source) -> None:
    """Give a known segment memory, and fill it with what the request will read of the artifact."""
    restore_blocks(memory, segment, source)
    if source.rebuild is not None:
        return
    run = source.run
    for layer, latents in enumerate(segment.layers):
        window = source.sections.section(layer_section(layer, "window"))
        kept = run.doc_length - window.shape[0]  # rows in front of the stored tail
        rows = window[max(run.doc_start - kept, 0) : run.doc_start + run.length - kept]
        latents.window[run.length - rows.shape[0] : run.length] = rows


def restore_blocks(memory: Workspace, segment: Segment, source: Source, *, windows: bool = True) -> None:
    """Give a segment of a document memory, and fill its blocks; without ``windows`` it has no room for window rows.

    It begins at a block boundary of the document. Errors as of ``restored_session``.
    """
    block, key = memory.space.geometry.block_length, source.key
    first, blocks, end = segment.start // block, -(-segment.length // block), segment.end
    if key is None:
        memory.allocate(segment, segment.length)
        missing, keys = list(range(blocks)), []
    else:
        keys = [key + number.to_bytes(8, "little") for number in range(first, first + blocks)]
        segment.end = end if windows else segment.start  # a workspace gives as many window rows as there are tokens
        missing = memory.find(segment, keys)
        segment.end = end
    for layer, latents in enumerate(segment.layers):
        for kind, held in (("entries", latents.entries), ("index_keys", latents.index_keys)):
            if held is not None and missing:
                _fill(held, missing, source.sections.section(layer_section(layer, kind)), first)
    if keys and segment.blocks is not None:
        for number in missing:
            segment.blocks.publish(number, keys[number])


def _fill(held: PagedRows, missing: Sequence[int], section: Tensor, first: int) -> None:
    """Copy blocks of a document's entries [n, width]; the segment's block 0 is block ``first`` of the document."""
    per_block = held.pool.per_block
    rows = (torch.tensor(missing).unsqueeze(-1) * per_block + torch.arange(per_block)).flatten()
    stored = rows + first * per_block
    there = stored < len(section)  # a document's last block may not be full
    held[rows[there]] = section[stored[there]]


def choose_rows(
    model: Model, session: Session, runs: list[KnownRun], token_ids: Tensor, profile: Profile, counters: Counters
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
    return pick_rows(total, runs, protected, ranking, profile, group, geometry.index_topk)


@torch.inference_mode()
def prefill_reusing(
    model: Model,
    session: Session,
    sources: Sequence[Source],
    rows: Rows,
    token_ids: Tensor,
    profile: Profile,
    counters: Counters,
    chunk: int = CHUNK_ROWS,
) -> Tensor:
    """Run what a profile runs over a restored session; returns the last row's logits [vocab].

    PoolFullError, before anything runs, unless every shared block in which rows run could be copied.
    """
    step = _Stages(model, session, sources, rows, token_ids, profile)
    _require_copies(session, step.in_fences | step.in_middle)
    logits = torch.empty(0)
    for lo, hi in pairwise(step.edges(chunk)):
        logits = forward(model, step.of(lo, hi), counters)
    return logits[-1]


def _require_copies(session: Session, running: Tensor) -> None:
    """PoolFullError unless the store has room for copies of all shared blocks in which rows ``running`` [n] lie."""
    copies, space = 0, session.memory_space()
    for segment in session.segments:
        if segment.blocks is not None:
            rows = running[segment.first : segment.stop].nonzero().flatten()
            copies += segment.blocks.shared((rows // space.layout.block_tokens).tolist())
    space.require(copies)


class _Stages:
    """The stages of one request, chunk by chunk."""

    def __init__(
        self, model: Model, session: Session, sources: Sequence[Source], rows: Rows, token_ids: Tensor, profile: Profile
    ) -> None:
        self.model, self.session, self.sources = model, session, sources
        self.token_ids, self.profile, self.rows = token_ids, profile, rows
        everywhere = torch.ones_like(rows.protected)
        fences = profile.fence_layers > 0 and profile.fence_idle is Treatment.FULL
        self.in_fences = everywhere if fences else rows.running
        self.in_middle = rows.running if profile.middle_idle is Treatment.SKIP else everywhere
        split = torch.zeros_like(rows.protected)
        if profile.middle_active is Treatment.GLOBAL_Z:
            split |= rows.active
        if profile.middle_idle is Treatment.GLOBAL_Z:
            split |= ~rows.running
        self.split = split

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
                go_on = (mine == self.rows.total - 1).nonzero().flatten()
            middle = span.start >= fence and span.stop <= layers - fence
            stages.append(
                Stage(
                    span,
                    RowSet(self.model.geometry, (self.session,), (mine,)),
                    self.token_ids[mine],
                    go_on,
                    fan_out=self._fan_out() if middle else None,
                    split=self._head_split(span, mine) if middle else None,
                    restored=self._restored(mine, positions[number - 1]) if number else None,
                )
            )
        return stages

    def _fan_out(self) -> FanOut | None:
        policy = self.profile.fan_out
        return None if policy is None else FanOut(policy.k_min, policy.tau)

    def _restored(self, mine: Tensor, before: Tensor) -> tuple[Tensor, Tensor] | None:
        """Rows that did not run in the stage before, with their stored streams."""
        entering = (~torch.isin(mine, before)).nonzero().flatten()
        if not len(entering):
            return None
        shape = (self.model.geometry.hc_mult, self.model.geometry.hidden_size)
        streams = self._gather(mine[entering], boundary_section("streams")).float()
        return entering, streams.unflatten(-1, shape)

    def _head_split(self, layers: range, mine: Tensor) -> HeadSplit | None:
        rows = self.split[mine].nonzero().flatten()
        if not len(rows):
            return None
        shard = self.model.group.shard
        restored = {
            layer: self._gather(mine[rows], shard_section(layer, "zl", shard.rank, shard.world)).float()
            for layer in layers
        }
        return HeadSplit(tuple(sorted(self.profile.global_heads)), rows, restored)

    def _gather(self, positions: Tensor, name: str) -> Tensor:
        """Stored rows of a section at request positions, all of which lie in known runs."""
        parts = []
        for source in self.sources:
            inside = positions[(positions >= source.run.start) & (positions < source.run.stop)]
            if len(inside):
                parts.append(source.sections.section(name)[inside - source.run.start + source.run.doc_start])
        return torch.cat(parts)
