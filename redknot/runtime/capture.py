"""What a forward writes down while it runs: for artifacts offline, for the row ranking in a probe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from redknot.latents.segment import Segment
from redknot.latents.session import Session
from redknot.runtime.layout import Block, RowSet
from redknot.runtime.model import HeadSlice, Model
from redknot.runtime.reads import Entries

if TYPE_CHECKING:  # it needs pydantic, which what runs does not
    from redknot.model.heads import HeadTable


@dataclass
class Capture:
    """Collects, chunk by chunk, the Local heads' contribution and the residual streams a profile needs."""

    heads: HeadTable | None = None  # the Global ones; the others are Local
    local_layers: range = range(0)  # layers whose Z_L is kept
    stream_layer: int | None = None  # the layer at whose entry the residual streams are kept
    wants_scores: bool = False  # indexer scores summed over rows and layers
    z_local: dict[int, list[Tensor]] = field(default_factory=dict)
    streams: list[Tensor] = field(default_factory=list)
    chunks: list[RowSet] = field(default_factory=list)  # the rows of each forward
    entry_scores: dict[int, Tensor] = field(default_factory=dict)  # id of a segment -> [entries]

    def before_layer(self, layer: int, rows: RowSet, streams: Tensor) -> None:
        """Called with the residual streams [T, hc, hidden] that enter a layer."""
        if layer == 0:
            self.chunks.append(rows)
        if layer == self.stream_layer:
            self.streams.append(streams.clone())

    def after_layer(self, layer: int, rows: RowSet, streams: Tensor) -> None:
        """Called with the residual streams [T, hc, hidden] behind a layer, of the rows that went on to its end."""

    def head_outputs(self, layer: int, block: Block, output: Tensor) -> None:
        """Called with what some heads leave a layer's output projection, rotated back: [t, G_rank, heads, d]."""

    def global_slice(self, model: Model, layer: int) -> HeadSlice | None:
        """The Global heads' weights where this layer's Z_L is kept, else None."""
        if self.heads is None or layer not in self.local_layers:
            return None
        return model.global_heads(layer, self.heads)

    def local(self, layer: int, z_local: Tensor) -> None:
        """Called with Z_L [T, G_rank * R] of a layer."""
        self.z_local.setdefault(layer, []).append(z_local)

    def streams_by_session(self, sessions: list[Session]) -> dict[int, Tensor]:
        """The kept residual streams of each whole session: id -> [n, hc, hidden]."""
        return self._by_session(self.streams, sessions)

    def local_by_session(self, layer: int, sessions: list[Session]) -> dict[int, Tensor]:
        """Z_L of one layer of each whole session: id -> [n, G_rank * R]."""
        return self._by_session(self.z_local[layer], sessions)

    def _by_session(self, kept: list[Tensor], sessions: list[Session]) -> dict[int, Tensor]:
        parts: dict[int, list[Tensor]] = {id(session): [] for session in sessions}
        for rows, values in zip(self.chunks, kept, strict=True):
            start = 0
            for session, positions in zip(rows.sessions, rows.positions, strict=True):
                parts[id(session)].append(values[start : start + len(positions)])
                start += len(positions)
        return {session: torch.cat(values) for session, values in parts.items()}

    def scores(self, seen: Entries, scores: Tensor) -> None:
        """Called with a block's indexer scores [t, N] over the entries it sees."""
        summed = scores.clamp(min=0).sum(0)  # hidden entries are -inf; visible scores below 0 carry no vote
        for (segment, _), column in zip(seen.parts, summed.split([count for _, count in seen.parts]), strict=True):
            self._add(segment, column)

    def _add(self, segment: Segment, column: Tensor) -> None:
        known = self.entry_scores.get(id(segment))
        self.entry_scores[id(segment)] = column if known is None else known + column
