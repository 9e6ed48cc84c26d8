"""The embedded engine: a request in, text and a report out; reuse where certificates hold, else dense, said aloud."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from redknot.comm.group import Group
from redknot.config import load_settings
from redknot.errors import ConfigError, InputError, RequestReason, ReuseUnavailableError, StoreError
from redknot.latents.session import Session
from redknot.latents.sizing import sized_for_pages
from redknot.latents.space import LatentSpace
from redknot.model.policy import Treatment
from redknot.model.profile import FAN_OUT, Profile, load_profile
from redknot.plan.planner import Span
from redknot.plan.rows import Rows
from redknot.runtime.agreement import Agreement
from redknot.runtime.counters import Counters
from redknot.runtime.decision import check_fit
from redknot.runtime.ledger import recompute_flops, recompute_row_layers
from redknot.runtime.library import Library, Refused
from redknot.runtime.loaded import Loaded, load
from redknot.runtime.metrics import Metrics
from redknot.runtime.prefill import dense_session, greedy, prefill, prefill_pages
from redknot.runtime.prefix import PrefixCache
from redknot.runtime.progress import Request
from redknot.runtime.reading import Reading
from redknot.runtime.report import Report, make_report
from redknot.runtime.request import REUSE_MODES, Text, read_length, read_request
from redknot.runtime.restore import Source, restored_session, segmented_session
from redknot.runtime.reuse import choose_rows, prefill_reusing, written_early
from redknot.runtime.staging import CopyStream
from redknot.runtime.windows import rebuild_windows

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """What a request returns."""

    text: str
    token_ids: tuple[int, ...]
    report: Report
    logits: Tensor = field(compare=False, repr=False)  # float32 [vocab], of the first token


class Engine:
    """A DeepSeek-V4 checkpoint, a store of artifacts, and one reuse profile, in this process.

    Args:
        model: folder of the checkpoint and its tokenizer.json, or what another engine has ``loaded``: weights are then
            shared, and the engines differ in what follows, each with latents and metrics of its own.
        store: folder of the artifact store; None serves dense.
        profile: name of a shipped profile, or a JSON file.
        namespace: whose documents may be reused.
        group: the tensor-parallel ranks; every rank makes the same calls.
        device: "cpu" (the default), "cuda" or "cuda:N"; where weights and latents lie and layers run.

    Several threads may use it: requests run one after the other, each on all cores. What it keeps of latents, and how
    much, ``config.LatentSettings`` says; as a context manager, or with ``close``, it leaves them in the disk tier.

    Raises UnsupportedModelError, CheckpointError, ConfigError, or StoreError without memory or folder for latents; an
    artifact store that cannot be opened is no error but the reason of every request (STORE_UNAVAILABLE).
    """

    def __init__(
        self,
        model: str | Path | Loaded,
        store: str | Path | None = None,
        profile: str | Profile = "rowsparse",
        *,
        namespace: str = "default",
        group: Group | None = None,
        device: str | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        if isinstance(model, Loaded) and (group is not None or device is not None):
            raise ConfigError("a loaded model has its group and device; give them to load()")
        self.loaded = model if isinstance(model, Loaded) else load(model, group, device or "cpu")
        self.model, self.tokenizer = self.loaded.model, self.loaded.tokenizer
        geometry, place = self.model.geometry, self.model.device
        self.profile = profile if isinstance(profile, Profile) else load_profile(profile)
        self.metrics = metrics if metrics is not None else Metrics()
        settings = load_settings().latents
        if self.profile.prefix_cache:
            settings = sized_for_pages(geometry, settings)
        self.latents = LatentSpace(geometry, settings, cost=partial(recompute_flops, geometry), device=place)
        self.metrics.watch("latents", self.latents.store.counters)
        self.metrics.watch_books(self.latents.store.books)
        self._namespace = namespace
        self._prefixes = self._prefix_cache() if self.profile.prefix_cache else None
        self._one_at_a_time = threading.Lock()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="redknot-read")
        library, unavailable = (None, "no store was given") if store is None else self._open(Path(store))
        copies = None if place.type == "cpu" else CopyStream(place)
        self._agreement = Agreement(library, unavailable, self.profile, self.model.group, self.metrics, copies)

    def _open(self, store: Path) -> tuple[Library | None, str]:
        """The documents of a store, or None and why there are none."""
        try:
            library = self.loaded.library(store, self._namespace, self.profile.needs())
        except StoreError as error:
            _log.warning("every request will run dense: %s", error)
            return None, str(error)
        self.metrics.watch("store", lambda: library.store.counters)
        self.metrics.watch("index", lambda: library.index.counters)
        return library, ""

    def _prefix_cache(self) -> PrefixCache:
        cache = PrefixCache(self.latents, self._namespace)
        self.metrics.watch("prefix_pages", lambda: cache.counters)
        return cache

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        segments: Sequence[Text] | None = None,
        spans: Sequence[Span | tuple[int, int]] | None = None,
        reuse: str = "auto",
        max_new_tokens: int = 64,
        stop_at_eos: bool = True,
    ) -> Result:
        """Answer one request greedily.

        Give exactly one of ``prompt`` (text), ``token_ids`` (any of the vocabulary, used as they are: BOS stands where
        they say and nowhere else) or ``segments`` (texts or ids, tokenised one by one, so document boundaries are
        exact; BOS is put in front). ``spans`` names the documents
        inside ``token_ids`` as [start, end) and nothing else is searched; a ``Span`` may say which artifact it is, and
        is new text when this namespace has no such artifact. ``reuse`` "required" raises ReuseUnavailableError instead
        of running dense; "off" runs every row of the prompt as recompute does, whatever the profile, and leaves nothing
        in a prefix cache. Raises InputError for a malformed request, and StoreError, before anything runs, for one that
        needs more room for latents than there is.
        """
        started = time.perf_counter()
        if reuse not in REUSE_MODES:
            raise InputError(f"reuse must be one of {', '.join(REUSE_MODES)}, not {reuse!r}")
        room = read_length(max_new_tokens)
        ids, found = read_request(self.tokenizer, self.model.geometry, prompt, token_ids, segments, spans, room)
        with self._one_at_a_time, ExitStack() as memory:
            request = Request(torch.tensor(ids, dtype=torch.int64), found, started, memory)
            return self._answer(request, reuse, room, stop_at_eos)

    @property
    def library(self) -> Library | None:
        """The documents it knows; None without a store that can be read."""
        return self._agreement.library

    def check_books(self) -> list[str]:
        """Recount the latent store: every difference from its books, one line each; none when they balance."""
        return self.latents.store.recount()

    def close(self) -> None:
        """Write cached latents to the disk tier, if there is one, and end; StoreError if the disk does not answer."""
        with self._one_at_a_time:
            self._threads.shutdown(cancel_futures=True)
            if self._prefixes is not None:
                self._prefixes.clear()
            self.latents.close()

    def _answer(self, request: Request, reuse: str, room: int, stop_at_eos: bool) -> Result:
        """Prefill, report, decode."""
        logits, session = self._first_logits(request, reuse, room)
        first = int(logits.argmax())
        request.wall["ttft_request_s"] = time.perf_counter() - request.started
        report = make_report(self.model, self.profile, request)
        for document in report.documents:
            if document.reason is not None:
                _log.info("document at token %d is new text: %s", document.start, document.reason)
        self.metrics.observe(report)
        if self._prefixes is not None and reuse != "off":
            self._prefixes.keep(session, request.token_ids)
        tokens = greedy(self.model, session, first, room, self.model.geometry.eos_token_ids if stop_at_eos else ())
        text, free = self.tokenizer.decode(tokens), logits.cpu().clone()  # of inference mode, and of the device
        return Result(text, tuple(tokens), report, free)

    def _first_logits(self, request: Request, reuse: str, room: int) -> tuple[Tensor, Session]:
        """Prefill as the profile says, if everything holds on every rank; else dense."""
        if reuse == "off":
            request.refuse(RequestReason.REUSE_OFF, "reuse was turned off for this request")
        elif self.profile.arm == FAN_OUT and reuse == "auto":
            try:
                return self._thinned(request, room)
            except Refused as refused:
                request.refuse(refused.reason, refused.detail)
        else:
            sources = self._agreed_sources(request)
            if request.reason is None and (found := self._read_and_reuse(request, sources, room)) is not None:
                return found
        request.log_reason("refused" if reuse == "required" else "dense")
        if reuse == "required":
            assert request.reason is not None  # whatever leads here has named one
            self.metrics.refused(request.reason)
            raise ReuseUnavailableError(f"reuse is required but not possible: {request.reason} ({request.detail})")
        return self._dense(request, room, None if reuse == "off" else self._prefixes)

    def _dense(self, request: Request, room: int, prefixes: PrefixCache | None) -> tuple[Tensor, Session]:
        """First logits with every row run that no prefix cache has."""
        started = time.perf_counter()
        ids, memory = request.token_ids, request.workspace_of(self.latents, self._namespace)
        if prefixes is None:
            session = dense_session(memory, len(ids), len(ids) + room)
            logits = prefill(self.model, [session], [ids], request.counters)
        else:
            session = prefixes.begin(memory, ids, len(ids) + room)
            request.cached = session.length
            logits = prefill_pages(self.model, session, ids, request.counters)
        request.wall["ttft_forward_s"] = time.perf_counter() - started
        return logits[0], session

    def _thinned(self, request: Request, room: int) -> tuple[Tensor, Session]:
        """First logits with every row run, in the middle layers by as many experts as the profile's policy leaves."""
        check_fit(self.profile, self.model.geometry)
        started = time.perf_counter()
        ids, memory = request.token_ids, request.workspace_of(self.latents, self._namespace)
        session = dense_session(memory, len(ids), len(ids) + room)
        every, none = torch.ones(len(ids), dtype=torch.bool), torch.zeros(len(ids), dtype=torch.bool)
        rows = Rows(len(ids), every, none)
        logits = prefill_reusing(self.model, session, (), rows, ids, self.profile, request.counters)
        request.wall["ttft_forward_s"] = time.perf_counter() - started
        return logits, session

    def _agreed_sources(self, request: Request) -> list[Source]:
        """What to reuse, the same on every rank; else the request has its reason."""
        sources: list[Source] = []
        try:
            self._agreement.plan(request)
            sources = self._agreement.sources(request)
        except Refused as refused:
            request.refuse(refused.reason, refused.detail)
        self._agreement.vote(request)
        return sources

    def _read_and_reuse(self, request: Request, sources: list[Source], room: int) -> tuple[Tensor, Session] | None:
        """First logits by reuse; None, with the reason, where a section cannot be used or nothing was saved."""
        reading = self._agreement.reading(self._threads, sources)
        try:
            return self._reusing(request, sources, reading, room)
        except Refused as refused:
            request.rows, request.counters = None, Counters()  # what ran answers nothing
            request.refuse(refused.reason, refused.detail)
            return None
        finally:
            reading.close()
            request.wall["read_wait_s"] = reading.waited

    def _reusing(
        self, request: Request, sources: list[Source], reading: Reading, room: int
    ) -> tuple[Tensor, Session] | None:
        """First logits by reuse; None when the profile's shares leave no row to skip, or none was skipped."""
        started = time.perf_counter()
        geometry, ids = self.model.geometry, request.token_ids
        runs = [source.run for source in sources]
        memory = request.workspace_of(self.latents, self._namespace)
        if self.profile.reuses_rows:
            written = written_early(len(ids), runs, self.profile, geometry)
            session = restored_session(memory, sources, len(ids), room, reading=reading, written=written)
        else:
            session = segmented_session(memory, runs, len(ids), room)
            session.reading = reading
        request.wall["restore_s"] = time.perf_counter() - started
        rows = choose_rows(self.model, session, runs, ids, self.profile, request.counters)
        restored = self.profile.middle_active is Treatment.GLOBAL_Z and bool(rows.active.any())
        if bool(rows.running.all()) and not restored:
            request.refuse(RequestReason.NOTHING_TO_REUSE, f"profile {self.profile.name} runs every row again")
            return None
        request.rows = rows
        rebuilding = time.perf_counter()
        rebuild_windows(self.model, memory, session, sources, request.counters)
        request.wall["windows_s"] = time.perf_counter() - rebuilding
        logits = prefill_reusing(self.model, session, sources, rows, ids, self.profile, request.counters)
        request.wall["ttft_forward_s"] = time.perf_counter() - started
        ran = request.counters
        for_request = ran.row_layers - ran.window_row_layers  # windows are kept for requests to come
        if for_request >= recompute_row_layers(geometry, len(ids)) and not ran.split_row_layers:
            request.rows, request.counters = None, Counters()  # the ledgers are of the prefill that answers
            request.refuse(RequestReason.NOTHING_TO_REUSE, f"profile {self.profile.name} ran every row again")
            return None
        return logits, session

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
