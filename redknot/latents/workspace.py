"""What one request, or one batch of documents, holds of a latent store: an arena and references to blocks.

Everything is given back as one, whatever happened in between. Blocks of new text stay open and private until then: to
share them by their content would take somebody with equal bytes, and nobody can know these bytes without having
computed them. Blocks of known documents are found by what the artifact says they hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from redknot.config import LATENT_ARENA_BYTES
from redknot.latents.content import caller_name
from redknot.latents.formats import RegionName
from redknot.latents.handles import ArenaFullError, Handle, Match, PoolFullError, Run
from redknot.latents.layout import ModelLayout
from redknot.latents.paged import Blocks, PagedRows, Use
from redknot.latents.segment import LayerLatents, Segment
from redknot.latents.session import Session, TailRows
from redknot.latents.space import LatentSpace
from redknot.latents.views import fields


@dataclass(frozen=True)
class Held:
    """Blocks of a request by what they are to it (``paged.Use``), and the bytes of its arena that it uses."""

    found: int
    filled: int
    copied: int
    fresh: int
    block_bytes: int  # of one
    arena_bytes: int

    @property
    def shared_bytes(self) -> int:
        """Bytes of blocks that other requests may hold at the same time."""
        return (self.found + self.filled) * self.block_bytes

    @property
    def own_bytes(self) -> int:
        """Bytes that are this request's alone."""
        return (self.copied + self.fresh) * self.block_bytes + self.arena_bytes


class Workspace:
    """See the module. A context manager; one thread at a time uses it."""

    def __init__(self, space: LatentSpace, namespace: str = "") -> None:
        """Take an arena; PoolFullError when all are in use."""
        self.space = space
        self.namespace = namespace
        self._store = space.store
        self._arena = space.store.arena()
        self._blocks: list[Blocks] = []

    # Giving memory.

    def session(self, segments: Sequence[Segment] = ()) -> Session:
        """A session with room for its open tails; ``segments`` may be another session's, to be read only.

        ArenaFullError when the arena has no room.
        """
        data = self._arena_bytes(self.space.tail_bytes)
        return Session(list(segments), self.space, _tail_rows(data, self.space.layout))

    def allocate(
        self, segment: Segment, capacity: int, *, tokens: int | None = None, shared: Sequence[Handle] = ()
    ) -> None:
        """Give a segment memory for ``capacity`` tokens.

        With ``tokens`` it has blocks for so many only, until it grows. Its first blocks are those of ``shared``, which
        others hold too; the rest is its own. PoolFullError or ArenaFullError when there is not so much; no block was
        taken for it then.
        """
        windows = self._windows(capacity)
        more = self._blocks_of(capacity if tokens is None else tokens) - len(shared)
        run = self._opened(Match(self._store.share(shared), []), more)
        self._attach(segment, windows, run, [Use.FOUND] * len(shared) + [Use.FRESH] * more)

    def grow(self, segment: Segment, tokens: int) -> None:
        """Let a segment have blocks for ``tokens`` tokens; PoolFullError, which changes nothing, without room."""
        blocks = segment.blocks
        assert blocks is not None  # it was allocated
        more = self._blocks_of(tokens) - len(blocks.handles)
        if more <= 0:
            return
        try:
            opened = blocks.grow(self.namespace, more)
        except PoolFullError:
            raise self.space.pool_full(more, self._store.room()) from None
        for handle in opened:
            self.space.block(self._store.fill(handle))

    def find(self, segment: Segment, keys: Sequence[bytes]) -> list[int]:
        """Give a closed segment memory, its blocks being known by ``keys``; returns the numbers of those not found.

        These are the segment's own and open: fill them, and ``Blocks.publish`` them. Errors as of ``allocate``.
        """
        windows = self._windows(segment.length)
        names = [caller_name(self.namespace, key) for key in keys]
        found = self._store.fetch(names)
        run = self._opened(found)
        uses = [Use.FOUND] * len(keys)
        for number in found.missing:
            uses[number] = Use.FRESH
        self._attach(segment, windows, run, uses)
        return found.missing

    # Giving back.

    def drop(self, segment: Segment) -> None:
        """Give back the blocks of one segment; its windows stay in the arena."""
        assert segment.blocks is not None  # it was given memory
        segment.blocks.free()
        self._blocks.remove(segment.blocks)

    def held(self) -> Held:
        """What is held now."""
        uses = Counter(use for blocks in self._blocks for use in blocks.uses)
        return Held(
            uses[Use.FOUND],
            uses[Use.FILLED],
            uses[Use.COPIED],
            uses[Use.FRESH],
            self._store.config.block_bytes,
            self._arena.used,
        )

    def close(self) -> None:
        """Give everything back; StaleHandleError when that was done before."""
        with self._arena:
            for blocks in self._blocks:
                blocks.free()

    def _attach(self, segment: Segment, windows: Tensor, run: Run, uses: list[Use]) -> None:
        first = segment.start // self.space.layout.block_tokens
        segment.blocks = Blocks(self._store, run, uses, lambda number: self.space.block_cost(first + number))
        self._blocks.append(segment.blocks)
        segment.layers = [
            LayerLatents(
                windows[layer],
                self._paged(segment.blocks, layer, RegionName.LATENTS),
                self._paged(segment.blocks, layer, RegionName.INDEX_KEYS),
            )
            for layer in range(self.space.geometry.num_layers)
        ]

    def _paged(self, blocks: Blocks, layer: int, name: RegionName) -> PagedRows | None:
        pool = self.space.pools[layer].get(name)
        return None if pool is None else PagedRows(pool, blocks)

    def _opened(self, found: Match, more: int = 0) -> Run:
        """A run with blocks of its own where none was found, and ``more`` behind; PoolFullError ends it."""
        count = len(found.missing) + more
        with ExitStack() as undo:
            undo.callback(self._store.free, found.run)
            try:
                self._store.open(found.run, self.namespace, more)
            except PoolFullError:
                raise self.space.pool_full(count, self._store.room()) from None
            handles = self._store.handles(found.run)
            for number in (*found.missing, *range(len(handles) - more, len(handles))):
                self.space.block(self._store.fill(handles[number]))
            undo.pop_all()
        return found.run

    def _windows(self, capacity: int) -> Tensor:
        return self.space.windows(self._arena_bytes(capacity * self.space.window_bytes))

    def _arena_bytes(self, nbytes: int) -> Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device=self.space.device)
        try:
            return self._arena.view(self._arena.allocate(nbytes))
        except ArenaFullError as error:
            raise ArenaFullError(f"the request is too long: {error}; raise {LATENT_ARENA_BYTES}") from None

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.space.layout.block_tokens)

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tail_rows(data: Tensor, layout: ModelLayout) -> dict[int, TailRows]:
    """Bytes of an arena as room for the longest tail of every layer that compresses."""
    found, start = {}, 0
    for number, layer in enumerate(layout.layers):
        if not layer.ratio:
            continue
        rows = fields(data, layer.tail, start)
        kv, gate = (rows[RegionName.RAW, part] for part in ("kv", "gate"))
        index_kv, index_gate = (rows.get((RegionName.RAW_INDEX, part), kv[:, :0]) for part in ("kv", "gate"))
        found[number] = (kv, gate, index_kv, index_gate)
        start += layer.tail.nbytes
    return found
