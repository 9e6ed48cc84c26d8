"""Running a request's rows over pages: where a prefill begins, what of it runs, and what is kept under its pages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import torch
from torch import Tensor

from redknot.errors import RequestReason
from redknot.latents.handles import PoolFullError
from redknot.latents.pages import Pages
from redknot.latents.segment import Segment
from redknot.latents.session import Session
from redknot.latents.space import LatentSpace
from redknot.model.policy import Treatment
from redknot.runtime.counters import Counters
from redknot.runtime.forward import Stage, forward
from redknot.runtime.layout import RowSet
from redknot.runtime.ledger import recompute_flops
from redknot.runtime.library import Refused
from redknot.runtime.model import Model
from redknot.runtime.prefill import CHUNK_ROWS, prefill_pages
from redknot.runtime.restore import restored_session, segmented_session
from redknot.runtime.reuse import Stages, choose_rows, require_copies, written_early
from redknot.runtime.windows import rebuild_windows
from redknot.serving.admission import require
from redknot.serving.batch import Piece
from redknot.serving.reading import Rate, Readers
from redknot.serving.served import Served

_NAMESPACE = ""  # of blocks; an artifact's are named by its certificate, which binds the namespace it belongs to


class RowRunner:
    """Sessions over the pages of one server process."""

    def __init__(self, model: Model, space: LatentSpace, pages: Pages, readers: Readers, context: int) -> None:
        self._model = model
        self._readers = readers
        self._rate = Rate()
        self._space = space
        self._pages = pages
        self._context = context
        self._size = model.geometry.block_length

    # Prefill.

    def prefill(self, served: Served, piece: Piece) -> Tensor | None:
        """Run a piece of a prefill; logits of its last row [vocab] if they are wanted.

        Errors are the request's: ReuseUnavailableError where it requires what turns out not to be there, StoreError
        without memory.
        """
        started = time.perf_counter()
        if served.session is None or served.at != piece.start:
            self._begin(served, piece)
        logits = self._run(served, piece)
        served.at = piece.stop
        served.prefilled = piece.final
        wall, seconds = served.request.wall, time.perf_counter() - started
        if served.reading is not None:
            wall["read_wait_s"] = served.reading.waited
        if not served.reported:
            wall["ttft_forward_s"] = wall.get("ttft_forward_s", 0.0) + seconds
            if piece.final:
                self._rate.add(served.request.counters.flops, wall["ttft_forward_s"])
        return logits if piece.final else None

    def _run(self, served: Served, piece: Piece) -> Tensor | None:
        if served.stages is not None:
            try:
                return self._reusing(served, served.stages, piece)
            except Refused as refused:  # a section that a later layer needs; nothing that ran is used
                served.request.refuse(refused.reason, refused.detail)
                self._give_up_reuse(served)
                self._begin_dense(served, piece)
        return self._dense(served, piece)

    def _begin(self, served: Served, piece: Piece) -> None:
        """A session that holds what is in front of the piece."""
        served.leave()
        request = served.request
        if len(piece.known) > len(request.token_ids):  # it was retracted: what it had generated is known by now
            request.token_ids = torch.tensor(list(piece.known), dtype=torch.int64)
        request.counters = Counters()
        if request.reason is None and served.agreement is not None:
            self._readers.limit(served, self._rate.seconds_of(self._skippable(served)))
            try:
                if self._begin_reuse(served, piece):
                    return
            except Refused as refused:
                request.refuse(refused.reason, refused.detail)
            self._give_up_reuse(served)
        self._begin_dense(served, piece)

    def _begin_dense(self, served: Served, piece: Piece) -> None:
        """One segment, its first rows from pages; on a branch no page is exact, and none is kept."""
        request = served.request
        served.keeps_pages = served.branch == served.exact
        pages = self._usable(piece, [Segment(0, 0, 0, closed=False)]) if served.keeps_pages else []
        memory = request.workspace_of(self._space, _NAMESPACE)
        served.session = self._pages.begin(memory, pages, self._context, len(request.token_ids))
        served.at = served.session.length
        self._count_cached(served)

    def _give_up_reuse(self, served: Served) -> None:
        """From here on the request runs dense, every row of it; an error where it must not."""
        request = served.request
        request.log_reason("dense")
        request.rows, request.counters, served.stages = None, Counters(), None
        if served.ask.reuse == "required":
            require(served)

    def _skippable(self, served: Served) -> int:
        """FLOPs of the rows that reuse does not run, about."""
        tokens = len(served.request.token_ids)
        known = sum(source.run.length for source in served.sources)
        return recompute_flops(self._model.geometry, tokens, self._model.group.shard) * known // max(tokens, 1)

    def _begin_reuse(self, served: Served, piece: Piece) -> bool:
        """A session cut at known documents; False, with the reason, where every row would run again."""
        request, agreement = served.request, served.agreement
        assert agreement is not None
        started, profile, sources = time.perf_counter(), agreement.profile, served.sources
        runs, total = [source.run for source in sources], len(request.token_ids)
        memory, room = request.workspace_of(self._space, _NAMESPACE), max(self._context - total, 1)
        if profile.reuses_rows:
            written = written_early(total, runs, profile, self._model.geometry)
            session = restored_session(
                memory, sources, total, room, reserve=False, reading=served.reading, written=written
            )
        else:
            session = segmented_session(memory, runs, total, room, reserve=False)
            session.reading = served.reading
        request.wall["restore_s"] = time.perf_counter() - started
        served.session, served.keeps_pages = session, True
        served.at = self._adopt(served, session, piece, runs[0].start)
        rows = choose_rows(self._model, session, runs, request.token_ids, profile, request.counters)
        restored = profile.middle_active is Treatment.GLOBAL_Z and bool(rows.active.any())
        if bool(rows.running.all()) and not restored:
            request.refuse(RequestReason.NOTHING_TO_REUSE, f"profile {profile.name} runs every row again")
            return False
        rebuild_windows(self._model, memory, session, sources, request.counters)
        request.rows = rows
        served.stages = Stages(self._model, session, sources, rows, request.token_ids, profile)
        behind = torch.arange(total) >= served.at
        require_copies(session, served.stages.anywhere & behind)
        self._count_cached(served)
        return True

    def _adopt(self, served: Served, session: Session, piece: Piece, first_known: int) -> int:
        """Take the rows in front of a piece from its pages, or those in front of the documents from exact ones."""
        pages = self._usable(piece, session.segments)
        if not piece.start and served.cached_pages is not None:
            exact = served.cached_pages(served.exact)[: first_known // self._size]
            pages = list(exact[: self._pages.kept(exact, session.segments)])
            for own, page in zip(piece.pages, pages, strict=False):
                self._pages.alias(page, own)
        by_first = {segment.first: segment for segment in session.segments if segment.length}
        found, end = self._pages.blocks(pages), len(pages) * self._size
        for (first, number), handle in found.items():
            blocks = by_first[first].blocks
            assert blocks is not None  # it was restored
            blocks.adopt(number, handle)
        for first, segment in by_first.items():
            if segment.pending is not None and first < end:
                segment.pending.adopted({number for place, number in found if place == first}, end - first)
        if pages:
            self._pages.restore(pages[-1], session)
        return end

    def _usable(self, piece: Piece, segments: Sequence[Segment]) -> list[int]:
        """The pages in front of a piece from which a session cut like this may go on: all, unless one was lost."""
        pages = piece.pages[: piece.start // self._size]
        return list(pages[: self._pages.kept(pages, segments)])

    def _count_cached(self, served: Served) -> None:
        if not served.reported:
            served.request.cached = served.at

    def _dense(self, served: Served, piece: Piece) -> Tensor | None:
        session, request = served.session, served.request
        assert session is not None

        def keep() -> None:
            self._keep(served, session, piece)

        ids = request.token_ids[: piece.stop]
        logits = prefill_pages(self._model, session, ids, request.counters, final=piece.final, after_chunk=keep)
        return logits[-1] if len(logits) else None

    def _reusing(self, served: Served, stages: Stages, piece: Piece) -> Tensor | None:
        session, request = served.session, served.request
        assert session is not None
        logits = None
        inner = [edge for edge in stages.edges(CHUNK_ROWS) if served.at < edge < piece.stop]
        edges = [served.at, *inner, piece.stop]
        for lo, hi in pairwise(edges):
            session.mark_pages(lo, hi)
            if bool(stages.anywhere[lo:hi].any()):
                logits = forward(self._model, stages.of(lo, hi), request.counters)
            self._keep(served, session, piece)
        return logits[-1] if logits is not None and len(logits) else None

    # Decode.

    def prepare_step(self, served: Served, piece: Piece) -> None:
        """Room for one row more; PoolFullError without."""
        session, memory = served.session, served.request.workspace
        assert session is not None
        assert memory is not None
        session.check()
        last = session.segments[-1]
        memory.grow(last, last.length + 1)
        assert last.blocks is not None  # it was allocated
        last.blocks.own((last.length // self._size,))  # a page may hold it that ended inside of it

    def steps(self, served: Sequence[Served], pieces: Sequence[Piece], counters: Counters) -> Tensor:
        """One row of each request in one forward; logits [requests, vocab]."""
        sessions = []
        for one, piece in zip(served, pieces, strict=True):
            session = one.session
            assert session is not None
            session.segments[-1].end += 1
            session.mark_pages(piece.start, piece.stop)
            sessions.append(session)
        positions = tuple(torch.tensor([piece.start]) for piece in pieces)
        rows = RowSet(self._model.geometry, tuple(sessions), positions)
        ids = torch.cat([piece.token_ids for piece in pieces])
        stage = Stage(range(self._model.geometry.num_layers), rows, ids, go_on=torch.arange(len(sessions)))
        logits = forward(self._model, [stage], counters)
        for one, session, piece in zip(served, sessions, pieces, strict=True):
            one.at = piece.stop
            self._keep(one, session, piece)
        return logits

    # Pages.

    def _keep(self, served: Served, session: Session, piece: Piece) -> None:
        """Keep the pages that were just completed; without room for one, whoever looks for it runs its rows again."""
        ends = session.boundaries if served.keeps_pages else ()
        if ends:
            session.require(self._model.geometry.num_layers - 1)  # where no row ran, nothing has asked for it yet
        for end in ends:
            for layer, tail in session.tails.items():
                # No row of these pages ran in the layer, so its tail is what it was.
                if layer not in session.boundary_tails.get(end, {}):
                    everything = torch.arange(len(tail.positions))
                    session.keep_boundary(layer, end, tail.positions, tail.raw, everything)
            with suppress(PoolFullError):
                self._pages.keep(piece.pages[end // self._size - 1], session, end)
        session.boundary_tails.clear()
