"""Pages: what a request leaves in its blocks, kept under the numbers that a server's page allocator gave it.

A page is one block length of a request's tokens. Kept are the blocks that hold its entries, shared with the request,
and the state at its end: the window rows and raw compressor rows that whoever goes on from there reads. A page whose
request was cut into segments (reuse) lies in blocks of several of them, and a block may lie in two pages; the later
page then has the later version of it. Everything is memory of one latent store, in its books, until the page is freed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from redknot.device import on_device
from redknot.latents.books import Counters
from redknot.latents.handles import Handle, PoolFullError, Run
from redknot.latents.segment import Segment, get_windows, put_windows
from redknot.latents.session import CompressorTail, Session
from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace

Place = tuple[int, int]  # a block: request position of its segment's first token, its number there


@dataclass(frozen=True, eq=False)
class _Page:
    """One page; ``end`` is the request position behind it."""

    end: int
    cut: tuple[Place, ...]  # of the segments in front of the end: request position and frame position of their start
    places: tuple[Place, ...]
    blocks: Run  # in the order of ``places``
    state: Run
    windows: tuple[int, ...]  # shape of the window rows in the state
    tails: tuple[tuple[int, Tensor, tuple[tuple[int, ...], ...]], ...]  # layer, positions, shapes of its raw rows


class Pages:
    """The pages of one server process, by page number. One thread at a time uses it."""

    def __init__(self, space: LatentSpace, namespace: str = "") -> None:
        self._space = space
        self._store = space.store
        self._namespace = namespace
        self._pages: dict[int, _Page] = {}
        self.counters = Counters(("kept", "lost"))  # lost: there was no room

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._pages

    def keep(self, page: int, session: Session, end: int) -> None:
        """Keep the page that ends at request position ``end`` of a session whose boundary tails there were left.

        What the number stood for before is freed. PoolFullError without room for the state, HandleError for a session
        whose memory was given back; nothing is kept then.
        """
        self.free((page,))
        try:
            self._pages[page] = self._made(session, end)
        except PoolFullError:
            self.counters["lost"] += 1
            raise
        self.counters["kept"] += 1

    def _made(self, session: Session, end: int) -> _Page:
        size = self._space.geometry.block_length
        lo = max(end - self._space.geometry.window, 0)
        windows = get_windows(session.segments, lo, end)
        tails = sorted(session.boundary_tails.get(end, {}).items())
        raw = [rows for _, tail in tails for rows in tail.raw]
        places: list[Place] = []
        handles: list[Handle] = []
        with ExitStack() as shared:
            for segment in session.segments:
                first, stop = max(end - size, segment.first), min(end, segment.stop)
                if first < stop and segment.blocks is not None:
                    numbers = range((first - segment.first) // size, (stop - 1 - segment.first) // size + 1)
                    run = segment.blocks.share(numbers)
                    shared.callback(self._store.free, run)
                    places += [(segment.first, number) for number in numbers]
                    handles += self._store.handles(run)
            state = self._written([windows, *raw])
            blocks = self._store.share(handles)
        shapes = tuple((layer, tail.positions, tuple(tuple(r.shape) for r in tail.raw)) for layer, tail in tails)
        cut = _cut(session.segments, end)
        return _Page(end, cut, tuple(places), blocks, state, tuple(windows.shape), shapes)

    def alias(self, page: int, other: int) -> None:
        """Let the number ``other`` stand for the same page as ``page``, which is kept; each is freed for itself."""
        found = self._pages[page]
        found = replace(found, blocks=self._store.fork(found.blocks), state=self._store.fork(found.state))
        self.free((other,))
        self._pages[other] = found

    def kept(self, pages: Sequence[int], segments: Sequence[Segment]) -> int:
        """How many of the first pages of a request are here, left by a session cut into such segments."""
        size = self._space.geometry.block_length
        for number, page in enumerate(pages):
            found, end = self._pages.get(page), (number + 1) * size
            if found is None or found.end != end or found.cut != _cut(segments, end):
                return number
        return len(pages)

    def blocks(self, pages: Sequence[int]) -> dict[Place, Handle]:
        """The blocks of a request's first pages, all of which are kept: the latest version of each."""
        found: dict[Place, Handle] = {}
        for page in pages:
            record = self._pages[page]
            found |= zip(record.places, self._store.handles(record.blocks), strict=True)
        return found

    def begin(self, memory: Workspace, pages: Sequence[int], capacity: int, tokens: int | None = None) -> Session:
        """A session of one open segment that holds the tokens of kept pages and goes on from there.

        It has room for ``capacity`` tokens, with ``tokens`` in blocks for so many only until it grows. PoolFullError or
        ArenaFullError without it.
        """
        segment = Segment(0, 0, 0, closed=False)
        memory.allocate(segment, capacity, tokens=tokens, shared=list(self.blocks(pages).values()))
        session = memory.session([segment])
        segment.end = len(pages) * self._space.geometry.block_length
        if pages:
            self.restore(pages[-1], session)
        return session

    def restore(self, page: int, session: Session) -> None:
        """Put the state at the end of a page into a session that goes on from there."""
        record = self._pages[page]
        shapes = [record.windows, *(shape for _, _, raw in record.tails for shape in raw)]
        windows, *raw = self._read(record.state, shapes)
        put_windows(session.segments, record.end - windows.shape[1], windows)
        rows = iter(raw)
        for layer, positions, _ in record.tails:
            kept = CompressorTail(positions, (next(rows), next(rows), next(rows), next(rows)))
            session.keep_tail(layer, positions, kept.raw, torch.arange(len(positions)))

    def free(self, pages: Iterable[int]) -> None:
        """Give up pages; numbers that stand for nothing are ignored."""
        for page in pages:
            found = self._pages.pop(page, None)
            if found is not None:
                self._store.free(found.blocks)
                self._store.free(found.state)

    def clear(self) -> None:
        """Give up all pages."""
        self.free(list(self._pages))

    def _written(self, parts: Sequence[Tensor]) -> Run:
        """A run of blocks that holds float32 tensors one behind the other."""
        data = torch.cat([part.reshape(-1) for part in parts]).view(torch.uint8)
        nbytes = self._store.config.block_bytes
        count = max(-(-len(data) // nbytes), 1)
        run = self._store.allocate(self._namespace, count)
        rows = pad(data, (0, count * nbytes - len(data))).view(count, nbytes)
        self._pool()[self._rows(run)] = rows
        return run

    def _read(self, run: Run, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """The tensors of ``_written``, copied."""
        numbers = self._pool()[self._rows(run)].view(torch.float32).flatten()
        sizes = [math.prod(shape) for shape in shapes]
        parts = numbers[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _pool(self) -> Tensor:
        return self._store.pool.view(-1, self._store.config.block_bytes)

    def _rows(self, run: Run) -> Tensor:
        nbytes = self._store.config.block_bytes
        rows = torch.tensor([handle.offset // nbytes for handle in self._store.handles(run)])
        return on_device(rows, self._space.device)


def _cut(segments: Sequence[Segment], end: int) -> tuple[Place, ...]:
    """Where the segments in front of a request position begin, in the request and in their frames."""
    first = [(segment.first, segment.start) for segment in segments if segment.first < end]
    return tuple(dict.fromkeys(first))
