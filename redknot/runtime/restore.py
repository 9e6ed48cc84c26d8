"""Sessions whose documents come from artifacts: the request cut at known runs, their blocks and windows filled.

The stored bytes themselves are never written to: blocks are shared as they are, and copied before a row leaves fresh
latents in them. A segment is filled layer by layer, so that reading may go on while the layers before run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from redknot.artifact.schema import layer_section
from redknot.device import on_device
from redknot.latents.paged import PagedRows, Use
from redknot.latents.segment import Segment
from redknot.latents.session import Reading, Session
from redknot.latents.workspace import Workspace
from redknot.plan.rows import KnownRun
from redknot.plan.windows import Rebuild


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
    names: tuple[str, ...] = ()  # of the sections that are read on this rank, layer by layer


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


def segmented_session(
    memory: Workspace, runs: Sequence[KnownRun], total: int, room: int, *, reserve: bool = True
) -> Session:
    """An empty session cut at the known runs, with room for ``room`` generated tokens.

    Without ``reserve`` its last segment has blocks for what is there, and must grow (``Workspace.grow``).
    Every segment but the last is closed. The last one is new text, or begins behind a known run that ends the request;
    without room there is none behind it. PoolFullError or ArenaFullError where the store has no room for all of it.
    """
    segments = []
    for segment, _, capacity in _cut(runs, total, room):
        memory.allocate(segment, capacity, tokens=None if reserve else segment.length)
        segments.append(segment)
    return memory.session(segments)


@torch.inference_mode()
def restored_session(
    memory: Workspace,
    sources: Sequence[Source],
    total: int,
    room: int,
    *,
    reserve: bool = True,
    reading: Reading | None = None,
    written: Tensor | None = None,
) -> Session:
    """As ``segmented_session``, its known segments filled from their artifacts: all but windows to be rebuilt.

    ``reserve`` as there. Blocks that the store has under an artifact's key are shared as they are; others are filled
    and can be found from then on. StoreError for a section that cannot be trusted.

    With ``reading`` nothing is filled yet: a layer is when a forward comes to it (``Session.require``), after waiting
    for the reading. The forward may leave rows in blocks that are not full by then; ``written`` [total] bool must hold
    where it will.
    """
    by_start, segments = {source.run.start: source for source in sources}, []
    for segment, run, capacity in _cut([source.run for source in sources], total, room):
        if run is None:
            memory.allocate(segment, capacity, tokens=None if reserve else segment.length)
        else:
            mine = None if written is None else written[run.start : run.stop]
            restore(memory, segment, by_start[run.start], written=mine)
        segments.append(segment)
    session = memory.session(segments)
    session.reading = reading
    if reading is None:
        session.require(memory.space.geometry.num_layers - 1)
    return session


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


def restore(
    memory: Workspace, segment: Segment, source: Source, *, windows: bool = True, written: Tensor | None = None
) -> None:
    """Give a segment of a document memory, to be filled from its artifact when its layers are needed.

    It begins at a block boundary of the document. Without ``windows`` it has no room for window rows. PoolFullError or
    ArenaFullError without room.
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
    touched: set[int] = set() if written is None else set((written.nonzero().flatten() // block).tolist())
    pending = _Restoring(memory, segment, source, first, missing, keys, windows=windows and source.rebuild is None)
    pending.set_aside([number for number in missing if keys and number in touched])
    segment.pending = pending


@dataclass(eq=False)
class _Restoring:
    """A segment that is filled layer by layer.

    A block is published when it is full. One in which the request leaves rows of its own before that is filled twice:
    for the request, and aside as the document has it, for others to find.
    """

    memory: Workspace
    segment: Segment
    source: Source
    first: int  # the block of the document that the segment's first one is
    missing: list[int]  # blocks to fill
    keys: Sequence[bytes]  # of the segment's blocks; none: they are not shared
    windows: bool  # whether its window rows are filled
    rows: int = 0  # window rows in front of this one are there
    done: int = 0  # layers
    aside: Segment | None = None
    numbers: list[int] = field(default_factory=list)  # the blocks of ``aside``

    def set_aside(self, numbers: list[int]) -> None:
        """Have blocks for what is published of these."""
        blocks = self.segment.blocks
        if numbers and blocks is not None:
            self.numbers, self.aside = numbers, Segment(0, 0, 0, closed=True)
            self.memory.allocate(self.aside, 0, tokens=len(numbers) * self.memory.space.geometry.block_length)
            for number in numbers:
                blocks.uses[number] = Use.COPIED

    @torch.inference_mode()
    def fill(self, layer: int) -> None:
        """Fill all layers up to this one, and publish behind the last."""
        for number in range(self.done, layer + 1):
            self._fill_layer(number)
        self.done = max(self.done, layer + 1)
        if self.done == len(self.segment.layers):
            self._publish()
            self.segment.pending = None

    def adopted(self, blocks: Collection[int], rows: int) -> None:
        """These blocks, and the window rows in front of this one, came from elsewhere and stay as they are."""
        self.missing = [number for number in self.missing if number not in blocks]
        self.rows = max(self.rows, rows)

    def _fill_layer(self, layer: int) -> None:
        latents, section = self.segment.layers[layer], self.source.sections.section
        for kind in ("entries", "index_keys"):
            held = getattr(latents, kind)
            if held is None or not (self.missing or self.numbers):
                continue
            stored = section(layer_section(layer, kind))
            _fill(held, self.missing, stored, [self.first + number for number in self.missing])
            if self.aside is not None:
                own = getattr(self.aside.layers[layer], kind)
                _fill(own, range(len(self.numbers)), stored, [self.first + number for number in self.numbers])
        if self.windows:
            self._fill_windows(latents.window, section(layer_section(layer, "window")))

    def _fill_windows(self, window: Tensor, stored: Tensor) -> None:
        run = self.source.run
        kept = run.doc_length - stored.shape[0]  # rows in front of the stored tail
        rows = stored[max(run.doc_start - kept, 0) : run.doc_start + run.length - kept]
        start = max(run.length - rows.shape[0], self.rows)
        if start < run.length:
            window[start : run.length] = on_device(rows[start - run.length :], window.device)

    def _publish(self) -> None:
        blocks, aside = self.segment.blocks, self.aside
        if not self.keys or blocks is None:
            return
        if aside is not None and aside.blocks is not None:
            for own, number in enumerate(self.numbers):
                aside.blocks.publish(own, self.keys[number], self.memory.space.block_cost(self.first + number))
            self.memory.drop(aside)
        for number in self.missing:
            if number not in self.numbers:
                blocks.publish(number, self.keys[number])


def _fill(held: PagedRows, blocks: Sequence[int], section: Tensor, stored: Sequence[int]) -> None:
    """Copy blocks ``stored`` of a document's entries [n, width] into ``blocks`` of a segment."""
    if not blocks:
        return
    per_block = held.pool.per_block
    within = torch.arange(per_block)
    into = (torch.tensor(blocks).unsqueeze(-1) * per_block + within).flatten()
    rows = (torch.tensor(stored).unsqueeze(-1) * per_block + within).flatten()
    there = rows < len(section)  # a document's last block may not be full
    picked = section[on_device(rows[there], section.device)]
    held[into[there]] = on_device(picked, held.pool.rows.device)
