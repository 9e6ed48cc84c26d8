"""The window rows that an artifact does not keep: recomputed over its entries, and kept for later requests.

``plan.windows`` says which rows run, and why they are exact. They run in the frame of their document, which need not
be in the request from its first token on: what lies in front of the run is read from the artifact too, entries and
token ids. Entries are never refreshed on the way: they are there, as the document's own forward left them, in blocks
that others may share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from redknot.artifact.sections import checkpoint_section
from redknot.device import on_device
from redknot.latents.segment import Segment, get_windows, put_windows
from redknot.latents.session import Session
from redknot.latents.states import State
from redknot.latents.workspace import Workspace
from redknot.plan.windows import Rebuild, WindowPlan
from redknot.runtime.counters import Counters
from redknot.runtime.forward import Stage, forward
from redknot.runtime.layout import RowSet
from redknot.runtime.model import Model
from redknot.runtime.prefill import CHUNK_ROWS
from redknot.runtime.restore import Source, restore

_WINDOWS = b"windows"  # in a state's key, behind its artifact's; blocks of the artifact are numbered there


@torch.inference_mode()
def rebuild_windows(
    model: Model,
    memory: Workspace,
    session: Session,
    sources: Sequence[Source],
    counters: Counters,
    chunk: int = CHUNK_ROWS,
) -> None:
    """Put the last w window rows of every known run in place whose artifact does not keep them.

    ``session`` was restored from ``sources`` in ``memory``; what runs is counted in ``counters``. Every rank of a group
    takes part: they recompute unless each of them has the state. StoreError where a section cannot be trusted;
    PoolFullError or ArenaFullError without room for what lies in front of a run.
    """
    by_start = {segment.first: segment for segment in session.segments if segment.length}
    if any(source.rebuild is not None for source in sources):
        session.require(model.geometry.num_layers - 1)
    for source in sources:
        if source.rebuild is not None:
            _Rebuilding(model, memory, by_start[source.run.start], source, source.rebuild).run(counters, chunk)


@dataclass(frozen=True)
class _Rebuilding:
    """One run's windows."""

    model: Model
    memory: Workspace
    segment: Segment  # of the request
    source: Source
    rebuild: Rebuild

    @property
    def plan(self) -> WindowPlan:
        return self.rebuild.plan

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the state [layers, rows, d]."""
        geometry = self.model.geometry
        return geometry.num_layers, min(geometry.window, self.plan.stop), geometry.head_dim

    def run(self, counters: Counters, chunk: int) -> None:
        """Find the state or compute it, and put it into the request's segment."""
        if self.plan.first[0] == self.plan.stop:
            state = self._checkpoint()
        else:
            with Workspace(self.memory.space, self.memory.namespace) as scratch:
                state = self._found_or_computed(scratch, counters, chunk)
        put_windows([self.segment], self.segment.stop - state.shape[1], state)

    def _checkpoint(self) -> Tensor:
        return on_device(self.source.sections.section(checkpoint_section(self.plan.checkpoint)), self.model.device)

    def _found_or_computed(self, scratch: Workspace, counters: Counters, chunk: int) -> Tensor:
        key, found, kept = self.source.key, None, None
        if key is not None:
            key += _WINDOWS + self.plan.stop.to_bytes(8, "little")
            kept = State(scratch, key, 4 * math.prod(self.shape))
            found = kept.read()
        everywhere = self.model.group.all_agree(found is not None)
        if found is not None and everywhere:
            return found.view(torch.float32).view(self.shape)
        before = counters.flops
        state = self._computed(scratch, counters, chunk)
        if kept is not None:
            kept.write(state.flatten().view(torch.uint8), counters.flops - before)
        return state

    def _computed(self, scratch: Workspace, counters: Counters, chunk: int) -> Tensor:
        """Run the plan's rows; returns the state."""
        plan, before = self.plan, counters.row_layers
        segments = self._frame(scratch)
        session = Session(segments, self.memory.space)
        session.require(self.model.geometry.num_layers - 1)
        if plan.checkpoint:
            put_windows(
                segments, plan.checkpoint - min(plan.checkpoint, self.model.geometry.window), self._checkpoint()
            )
        for lo in range(plan.first[0], plan.stop, chunk):
            forward(self.model, list(self._stages(session, lo, min(lo + chunk, plan.stop))), counters)
        counters.window_rows += plan.rows
        counters.window_row_layers += counters.row_layers - before
        return get_windows(segments, plan.stop - self.shape[1], plan.stop)

    def _frame(self, scratch: Workspace) -> list[Segment]:
        """The document up to ``stop`` in its own frame: what lies in front of the run, and the run where it lies."""
        run, block, there = self.source.run, self.model.geometry.block_length, self.segment
        inside = Segment(0, run.doc_start, self.plan.stop, closed=True, layers=there.layers, blocks=there.blocks)
        # No window in front of this is read or written. Whole blocks, as groups are counted from a segment's first row.
        cut = max(self.plan.first[0] - self.model.geometry.window, 0) // block * block
        spans = ((0, min(cut, run.doc_start), False), (cut, run.doc_start, True))
        in_front = [(Segment(0, lo, hi, closed=True), windows) for lo, hi, windows in spans if lo < hi]
        for segment, windows in in_front:
            restore(scratch, segment, self.source, windows=windows)
        return [*(segment for segment, _ in in_front), inside]

    def _stages(self, session: Session, lo: int, hi: int) -> Iterator[Stage]:
        """The rows of document positions [lo, hi), each as far up as the plan wants it."""
        firsts = [max(first, lo) for first in self.plan.first]
        spans = [(start, list(layers)) for start, layers in groupby(range(len(firsts)), key=firsts.__getitem__)]
        for number, (start, layers) in enumerate(spans):
            if start >= hi:
                return
            above = spans[number + 1][0] if number + 1 < len(spans) else hi
            positions = torch.arange(start, hi)
            yield Stage(
                range(layers[0], layers[-1] + 1),
                RowSet(self.model.geometry, (session,), (positions,)),
                self.rebuild.token_ids[positions],
                go_on=torch.arange(min(above, hi) - start, hi - start),
                refresh=False,
            )
