"""Sessions whose documents come from artifacts: the request cut at known runs, their blocks and windows filled.

The stored bytes themselves are never written to: blocks are shared as they are, and copied before a row leaves fresh
latents in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from redknot.artifact.schema import layer_section
from redknot.latents.paged import PagedRows
from redknot.latents.segment import Segment
from redknot.latents.session import Session
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
    memory: Workspace, sources: Sequence[Source], total: int, room: int, *, reserve: bool = True
) -> Session:
    """As ``segmented_session``, its known segments filled from their artifacts: all but windows to be rebuilt.

    ``reserve`` as there. Blocks that the store has under an artifact's key are shared as they are; others are filled
    and can be found from then on. StoreError for a section that cannot be trusted.
    """
    by_start, segments = {source.run.start: source for source in sources}, []
    for segment, run, capacity in _cut([source.run for source in sources], total, room):
        if run is None:
            memory.allocate(segment, capacity, tokens=None if reserve else segment.length)
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
