"""Latents as plain tensors, one for each layer of each segment: what the latent store must be equal to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from redknot.artifact.schema import layer_section
from redknot.latents.segment import Segment
from redknot.latents.session import CompressorTail, Session
from redknot.latents.space import LatentSpace
from redknot.model.geometry import Geometry, LayerKind
from redknot.runtime import attention
from redknot.runtime.restore import Source, _cut
from tests.kit.memory import NAN


@dataclass(eq=False)
class PlainLayer:
    window: Tensor
    entries: Tensor
    index_keys: Tensor


class PlainSession(Session):
    """Tails are tensors of their own, too."""

    def keep_tail(self, layer: int, positions: Tensor, raw: Sequence[Tensor], index: Tensor) -> None:
        kept: Any = tuple(rows[index] for rows in raw)
        self.tails[layer] = CompressorTail(positions, kept)


@dataclass
class PlainPlaces:
    rows: list[Tensor]

    def write(self, fields: list[Tensor], values: Tensor) -> None:
        for field, rows, part in zip(fields, self.rows, values.split([len(rows) for rows in self.rows]), strict=True):
            field[rows] = part


def give(segment: Segment, geometry: Geometry, capacity: int) -> None:
    """Memory for ``capacity`` tokens, all NaN."""
    for layer in range(geometry.num_layers):
        ratio = geometry.ratio(layer)
        entries = -(-capacity // ratio) if ratio else 0
        indexed = entries if geometry.kinds[layer] is LayerKind.CSA else 0
        shapes = ((capacity, geometry.head_dim), (entries, geometry.head_dim), (indexed, geometry.index_head_dim))
        made: Any = PlainLayer(*(torch.full(shape, NAN) for shape in shapes))
        segment.layers.append(made)


def plain_session(space: LatentSpace, sources: Sequence[Source], total: int, room: int, *, restore: bool) -> Session:
    """A session cut at the sources' runs, filled from them if asked; ``space`` serves probes only."""
    by_start, segments = {source.run.start: source for source in sources}, []
    for segment, run, capacity in _cut([source.run for source in sources], total, room):
        give(segment, space.geometry, capacity)
        segments.append(segment)
        if run is not None and restore:
            _fill(segment, by_start[run.start], space.geometry)
    return PlainSession(segments, space)


def _fill(segment: Segment, source: Source, geometry: Geometry) -> None:
    run = source.run
    for layer, latents in enumerate(segment.layers):
        window = source.sections.section(layer_section(layer, "window"))
        for row in range(run.length):
            at = row + run.doc_start - (run.doc_length - len(window))
            if at >= 0:
                latents.window[row] = window[at]
        ratio = geometry.ratio(layer)
        for kind in ("entries", "index_keys"):
            held: Any = getattr(latents, kind)
            if len(held):
                stored = source.sections.section(layer_section(layer, kind))
                held[:] = stored[run.doc_start // ratio :][: len(held)]


@contextmanager
def plain_reads() -> Iterator[None]:
    """Attention over plain sessions: entries of several segments are concatenated."""

    def read(scope: Any, block: Any, seen: Any, kind: str) -> Tensor:
        parts = [getattr(segment.layers[scope.layer], kind)[:count] for segment, count in seen.parts]
        return attention._turned(scope, block, seen.table, torch.cat(parts))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_read_entries", read)
        patch.setattr(attention, "_places", lambda cache, owner, fields, rows: PlainPlaces(rows))
        patch.setattr(attention, "_paged", lambda segment, layer, kind: getattr(segment.layers[layer], kind))
        yield
