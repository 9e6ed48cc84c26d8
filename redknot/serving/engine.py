"""The engine behind a server that owns the schedule: it runs the rows it is given, over pages that the server numbers.

The server decides which rows of which requests run together, and allocates a page for each block of a request's
tokens, reused or not. Here the rows are run, or skipped where an artifact stands for them; what they leave is kept
under the page numbers, so that a request may go on from any page, its own or another's. All tensor-parallel ranks
make the same calls in the same order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from redknot.comm.group import Group, OneProcess
from redknot.config import load_settings
from redknot.errors import RedKnotError, ReuseUnavailableError
from redknot.latents.pages import Pages
from redknot.latents.space import LatentSpace
from redknot.model.checkpoint import load_model
from redknot.runtime.counters import Counters
from redknot.runtime.ledger import recompute_flops
from redknot.runtime.loaded import DTYPE
from redknot.runtime.metrics import Metrics
from redknot.runtime.model import Model
from redknot.runtime.report import make_report
from redknot.serving.admission import Admissions
from redknot.serving.batch import Admission, Ask, CachedPages, Outcome, Piece, nothing_cached
from redknot.serving.libraries import Libraries
from redknot.serving.naming import named_profiles
from redknot.serving.reading import Readers
from redknot.serving.rows import RowRunner
from redknot.serving.served import Served
from redknot.serving.sizing import serving_settings

_log = logging.getLogger(__name__)


class ServingEngine:
    """See the module.

    Args:
        checkpoint: folder of the model.
        store: folder of the artifact store; None serves dense.
        profile: name of a shipped profile, or a JSON file, of requests that name none.
        pages: page numbers are below this.
        requests: how many may hold memory at the same time.
        context: tokens of the longest request, answer included.
        group: the tensor-parallel ranks.
        namespace: whose documents a request sees that says nothing else.
        shared: the namespace whose documents every other one sees too.
        read_timeout_s: the longest that a request waits for its artifacts.
        profiles: files of profiles that requests may name, beside the shipped ones and ``profile``.

    Raises UnsupportedModelError, CheckpointError, ConfigError, or StoreError where memory for latents cannot be had.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        store: str | Path | None,
        profile: str = "rowsparse",
        *,
        pages: int,
        requests: int,
        context: int,
        group: Group | None = None,
        namespace: str = "default",
        shared: str | None = None,
        read_timeout_s: float = 10.0,
        profiles: Sequence[str] = (),
        metrics: Metrics | None = None,
    ) -> None:
        path = Path(checkpoint)
        group = group if group is not None else OneProcess()
        geometry, weights = load_model(path, DTYPE, group.shard)
        self.model = Model(geometry, weights, group)
        self.page_tokens = geometry.block_length
        self.profile, self._profiles = named_profiles(profile, profiles)
        self.metrics = metrics if metrics is not None else Metrics()
        settings = serving_settings(geometry, load_settings().latents, pages=pages, requests=requests, context=context)
        self.latents = LatentSpace(geometry, settings, cost=partial(recompute_flops, geometry))
        self.metrics.watch("latents", self.latents.store.counters)
        self.metrics.watch_books(self.latents.store.books)
        self.libraries = Libraries(
            path, None if store is None else Path(store), self.model, self.metrics, DTYPE, shared
        )
        self._namespace = namespace
        self._pages = Pages(self.latents)
        self._readers = Readers(read_timeout_s)
        self._admissions = Admissions(self.libraries, self._readers, self.profile, self._profiles, context, namespace)
        self._rows = RowRunner(self.model, self.latents, self._pages, self._readers, context)
        self._requests: dict[str, Served] = {}
        self.metrics.watch("pages", lambda: self._pages.counters)
        self.metrics.watch_level("pages", "Pages that are kept now.", lambda: len(self._pages))
        self.metrics.watch_level(
            "requests_running", "Requests that were admitted and have not ended.", lambda: len(self._requests)
        )

    def admit(
        self,
        request_id: str,
        token_ids: Sequence[int],
        ask: Ask,
        *,
        namespace: str | None = None,
        arrived: float | None = None,
        cached_pages: CachedPages = nothing_cached,
    ) -> Admission:
        """Decide what a request reuses, and where its pages belong; its artifacts are read in the background.

        ``arrived`` is when it came, on the clock of ``time.perf_counter``. InputError for a malformed request;
        ReuseUnavailableError where it requires reuse and there is none.
        """
        space = self._namespace if namespace is None else namespace
        try:
            served = self._admissions.admit(token_ids, ask, space, arrived, cached_pages)
        except RedKnotError:
            raise
        except Exception:
            self.metrics.failed()
            raise
        request = served.request
        reuses, reason = served.branch != served.exact, None if request.reason is None else request.reason.value
        served.admission = Admission(served.branch, reuses, reason, request.detail)
        self.release(request_id)  # what an earlier request of its id may have left
        self._requests[request_id] = served
        return served.admission

    def forward(self, pieces: Sequence[Piece]) -> Outcome:
        """Run the rows of some requests; a request that was never admitted runs dense, and is not reported.

        Prefills run one after the other, each with counters of its own; then all decode steps run together.
        """
        # A sampler may work on the logits in place, which it could not on a tensor of inference mode.
        outcome = Outcome(torch.zeros(len(pieces), self.model.geometry.vocab_size), {}, {})
        with torch.inference_mode():
            self._run(pieces, outcome)
        return outcome

    def _run(self, pieces: Sequence[Piece], outcome: Outcome) -> None:
        steps: list[tuple[int, Piece, Served]] = []
        for number, piece in enumerate(pieces):
            served = self._requests.get(piece.request_id) or self._dense(piece)
            if served.failed:  # a step that was on its way when the request failed
                continue
            if served.prefilled and served.at == piece.start:
                steps.append((number, piece, served))
                continue
            try:
                logits = self._rows.prefill(served, piece)
                if logits is not None:
                    outcome.logits[number] = logits
                if piece.final:
                    self._end_prefill(served, piece, outcome)
            except Exception as error:  # noqa: BLE001  whatever it is, it is this request's alone
                self._fail(piece, error, outcome)
        self._decode(steps, outcome)

    def release(self, request_id: str, *, ended: bool = True, admission: Admission | None = None) -> None:
        """Give back what a request holds; one that has not ended (a retracted one) may come back.

        With ``admission`` it is that request alone, and no later one of the same id.
        """
        served = self._requests.get(request_id)
        if served is None or (admission is not None and served.admission is not admission):
            return
        served.leave()
        if ended:
            served.end()
            del self._requests[request_id]

    def has_page(self, page: int) -> bool:
        """Whether a page of a request of ours is kept under this number."""
        return page in self._pages

    def free_pages(self, pages: Iterable[int]) -> None:
        """The server gave up these pages."""
        self._pages.free(pages)

    def clear_pages(self) -> None:
        """The server gave up all pages."""
        self._pages.clear()

    def state(self) -> dict[str, object]:
        """Plain JSON values: whether reuse is on, what is held now, and whether a recount of it finds the same."""
        store, books, wrong = self.libraries.store, self.latents.store.books(), self.check_books()
        return {
            "reuse": "off" if store is None or not self.profile.reuses else "on",
            "detail": self.libraries.unavailable if store is None else "",
            "checkpoint": self.libraries.checkpoint,
            "profiles": {name: profile.digest() for name, profile in self._profiles.items()},
            "tp_size": self.model.group.shard.world,
            "requests": len(self._requests),
            "pages": len(self._pages),
            "pages_lost": self._pages.counters["lost"],
            "bytes": {tier: {"live": book.live, "total": book.total} for tier, book in books.items()},
            "books": "; ".join(wrong) if wrong else "balanced",
        }

    def check_books(self) -> list[str]:
        """Recount the latent store: every difference from its books, one line each; none when they balance."""
        return self.latents.store.recount()

    def close(self) -> None:
        """End every request and the store."""
        for request_id in list(self._requests):
            self.release(request_id)
        self._readers.close()
        self._pages.clear()
        self.latents.close()

    def _dense(self, piece: Piece) -> Served:
        """Admit what no client waits for: a server may run a row of a request that it has refused."""
        self.admit(piece.request_id, piece.known, Ask(reuse="off"))
        served = self._requests[piece.request_id]
        served.reported = True
        return served

    def _decode(self, steps: Sequence[tuple[int, Piece, Served]], outcome: Outcome) -> None:
        """One row of each request, all in one forward."""
        ready: list[tuple[int, Piece, Served]] = []
        for number, piece, served in steps:
            try:
                self._rows.prepare_step(served, piece)
                ready.append((number, piece, served))
            except Exception as error:  # noqa: BLE001  as in ``forward``
                self._fail(piece, error, outcome)
        if not ready:
            return
        try:
            logits = self._rows.steps([served for _, _, served in ready], [piece for _, piece, _ in ready], Counters())
        except Exception as error:  # noqa: BLE001  one forward: nobody knows whose rows it was
            for _, piece, _ in ready:
                self._fail(piece, error, outcome)
            return
        for (number, _, _), row in zip(ready, logits, strict=True):
            outcome.logits[number] = row

    def _end_prefill(self, served: Served, piece: Piece, outcome: Outcome) -> None:
        """Report a request once; a retracted one is prefilled again without."""
        if served.reported:
            return
        served.reported = True
        served.request.wall["ttft_request_s"] = time.perf_counter() - served.request.started
        profile = served.agreement.profile if served.agreement is not None else self.profile
        report = make_report(self.model, profile, served.request)
        self.metrics.observe(report)
        assert isinstance(outcome.reports, dict)
        outcome.reports[piece.request_id] = report.to_dict()

    def _fail(self, piece: Piece, error: Exception, outcome: Outcome) -> None:
        """End one request; its memory is given back, and the server is told why."""
        _log.error("request %s failed: %s", piece.request_id, error, exc_info=error)
        if not isinstance(error, ReuseUnavailableError):  # which is counted with its reason
            self.metrics.failed()
        served = self._requests[piece.request_id]
        served.leave()
        served.failed = True  # until the server lets go of it
        assert isinstance(outcome.failures, dict)
        outcome.failures[piece.request_id] = f"{type(error).__name__}: {error}"

    def __enter__(self) -> ServingEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
