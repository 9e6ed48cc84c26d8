"""The embedded engine: a request in, text and a report out; reuse where certificates hold, else dense, said aloud."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from redknot.artifact.store import ArtifactStore
from redknot.comm.group import Group, OneProcess
from redknot.config import load_settings
from redknot.errors import InputError, RequestReason, ReuseUnavailableError, StoreError
from redknot.latents.segment import Segment, allocate
from redknot.latents.session import Session
from redknot.model.checkpoint import load_model
from redknot.model.geometry import Geometry
from redknot.model.profile import Profile, load_profile
from redknot.model.tokenizer import load_tokenizer
from redknot.plan.match import match_spans, match_tokens
from redknot.plan.planner import Plan, make_plan
from redknot.plan.rows import Rows
from redknot.runtime.counters import Counters
from redknot.runtime.identity import model_identity
from redknot.runtime.ledger import ledgers
from redknot.runtime.library import Library, Refused
from redknot.runtime.metrics import Metrics
from redknot.runtime.model import Model
from redknot.runtime.prefill import decode, dense_session, prefill
from redknot.runtime.report import DocumentReport, Report
from redknot.runtime.reuse import Source, choose_rows, prefill_reusing, restore, segmented_session

_log = logging.getLogger(__name__)
DTYPE = torch.float32  # the CPU runs and stores float32
REUSE_MODES = ("auto", "off", "required")
Text = str | Sequence[int]


@dataclass(frozen=True)
class Result:
    """What a request returns."""

    text: str
    token_ids: tuple[int, ...]
    report: Report


@dataclass
class _Request:
    """One request on its way: ids [n], the client's document spans, and what has been decided so far."""

    token_ids: Tensor
    spans: list[tuple[int, int]] | None
    started: float
    counters: Counters = field(default_factory=Counters)
    plan: Plan | None = None
    rows: Rows | None = None
    reason: RequestReason | None = None
    detail: str = ""
    wall: dict[str, float] = field(default_factory=dict)


class Engine:
    """A DeepSeek-V4 checkpoint, a store of artifacts, and one reuse profile, in this process.

    Args:
        model: folder of the checkpoint and its tokenizer.json.
        store: folder of the artifact store; None serves dense.
        profile: name of a shipped profile, or a JSON file.
        namespace: whose documents may be reused.
        group: the tensor-parallel ranks; every rank makes the same calls.

    Raises UnsupportedModelError, CheckpointError or ConfigError; a store that cannot be opened is not an error
    but the reason of every request (STORE_UNAVAILABLE).
    """

    def __init__(
        self,
        model: str | Path,
        store: str | Path | None = None,
        profile: str | Profile = "rowsparse",
        *,
        namespace: str = "default",
        group: Group | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        checkpoint = Path(model)
        group = group if group is not None else OneProcess()
        geometry, weights = load_model(checkpoint, DTYPE, group.shard)
        self.model = Model(geometry, weights, group)
        self.tokenizer = load_tokenizer(checkpoint, geometry)
        self.profile = profile if isinstance(profile, Profile) else load_profile(profile)
        self.metrics = metrics if metrics is not None else Metrics()
        self._library: Library | None = None
        self._no_library: Refused | None = None
        if store is not None:
            self._open(checkpoint, Path(store), namespace)

    def _open(self, checkpoint: Path, store: Path, namespace: str) -> None:
        geometry = self.model.geometry
        try:
            opened = ArtifactStore(store)
        except StoreError as error:
            self._no_library = Refused(RequestReason.STORE_UNAVAILABLE, str(error))
            _log.warning("every request will run dense: %s", error)
            return
        identity = model_identity(checkpoint, geometry, DTYPE, load_settings().cache_dir)
        shard = self.model.group.shard
        self._library = Library(opened, identity, geometry, namespace, self.profile.needs(), shard)

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        segments: Sequence[Text] | None = None,
        spans: Sequence[tuple[int, int]] | None = None,
        reuse: str = "auto",
        max_new_tokens: int = 64,
        stop_at_eos: bool = True,
    ) -> Result:
        """Answer one request greedily.

        Give exactly one of ``prompt`` (text), ``token_ids`` (used as they are) or ``segments`` (texts or ids,
        tokenised one by one, so document boundaries are exact; BOS is put in front). ``spans`` names the documents
        inside ``token_ids`` as [start, end). ``reuse`` "required" raises ReuseUnavailableError instead of running
        dense. Raises InputError for a malformed request.
        """
        request = self._accept(prompt, token_ids, segments, spans, reuse, max_new_tokens)
        logits, session = self._first_logits(request, reuse, max_new_tokens)
        first = int(logits.argmax())
        request.wall["ttft_request_s"] = time.perf_counter() - request.started
        report = self._report(request)
        self.metrics.observe(report)
        tokens = self._continue(session, first, max_new_tokens, stop_at_eos)
        return Result(self.tokenizer.decode(tokens), tuple(tokens), report)

    def _accept(
        self,
        prompt: str | None,
        token_ids: Sequence[int] | None,
        segments: Sequence[Text] | None,
        spans: Sequence[tuple[int, int]] | None,
        reuse: str,
        max_new_tokens: int,
    ) -> _Request:
        started = time.perf_counter()
        if reuse not in REUSE_MODES:
            raise InputError(f"reuse must be one of {', '.join(REUSE_MODES)}, not {reuse!r}")
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        if sum(given is not None for given in (prompt, token_ids, segments)) != 1:
            raise InputError("give exactly one of prompt, token_ids and segments")
        if spans is not None and token_ids is None:
            raise InputError("spans count positions of token_ids; give token_ids, or segments without spans")
        found: list[tuple[int, int]] | None = None
        if segments is not None:
            ids, found = self._join(segments)
        elif prompt is not None:
            ids = [*self._bos(), *self.tokenizer.encode(prompt).tolist()]
        else:
            ids = list(token_ids or ())
            found = [(int(start), int(end)) for start, end in spans] if spans is not None else None
        _check_ids(ids, self.model.geometry, max_new_tokens)
        return _Request(torch.tensor(ids, dtype=torch.int64), found, started)

    def _bos(self) -> list[int]:
        bos = self.model.geometry.bos_token_id
        return [] if bos is None else [bos]

    def _join(self, segments: Sequence[Text]) -> tuple[list[int], list[tuple[int, int]]]:
        """BOS and the segments' ids; every segment but the last is a document span."""
        if isinstance(segments, str):
            raise InputError("segments must be a list of texts or of token id lists, not one text")
        ids, spans = self._bos(), []
        for segment in segments:
            part = self.tokenizer.encode(segment).tolist() if isinstance(segment, str) else list(segment)
            if part:
                spans.append((len(ids), len(ids) + len(part)))
            ids += part
        return ids, spans[:-1]

    def _first_logits(self, request: _Request, reuse: str, room: int) -> tuple[Tensor, Session]:
        """Prefill, reusing if everything holds on every rank."""
        sources: list[Source] = []
        if reuse == "off":
            request.reason, request.detail = RequestReason.REUSE_OFF, "reuse was turned off for this request"
        else:
            try:
                sources = self._sources(request)
            except Refused as refused:
                request.reason, request.detail = refused.reason, refused.detail
        # Every rank votes before anything that only a reusing request does.
        if reuse != "off" and not self.model.group.all_agree(request.reason is None) and request.reason is None:
            request.reason, request.detail = RequestReason.RANK_DISAGREEMENT, "another rank could not certify reuse"
        if request.reason is None:
            return self._reusing(request, sources, room)
        if reuse == "required":
            raise ReuseUnavailableError(f"reuse is required but not possible: {request.reason} ({request.detail})")
        if request.reason not in (RequestReason.REUSE_OFF, RequestReason.NOTHING_TO_REUSE):
            _log.warning("dense: %s (%s)", request.reason, request.detail)
        started = time.perf_counter()
        ids = request.token_ids
        session = dense_session(self.model.geometry, len(ids), len(ids) + room)
        logits = prefill(self.model, [session], [ids], request.counters)[0]
        request.wall["ttft_forward_s"] = time.perf_counter() - started
        return logits, session

    def _sources(self, request: _Request) -> list[Source]:
        """Match, plan and certify; raises Refused with the reason to run dense."""
        if self._no_library is not None:
            raise self._no_library
        if self._library is None:
            raise Refused(RequestReason.STORE_UNAVAILABLE, "no store was given")
        if not self.profile.reuses:
            raise Refused(RequestReason.REUSE_OFF, f"profile {self.profile.name} reuses nothing")
        _check_profile(self.profile, self.model.geometry)
        library = self._library
        library.refresh()
        tokens = request.token_ids.numpy().astype(np.int32)
        spans = request.spans
        matches = match_spans(tokens, spans, library.index) if spans else match_tokens(tokens, library.index)
        plan = make_plan(len(tokens), matches, spans or [], library.known(), self.profile, self.model.geometry)
        request.plan = plan
        request.wall["match_s"] = time.perf_counter() - request.started
        if not plan.runs:
            raise Refused(RequestReason.NOTHING_TO_REUSE, "no document of the request can be reused")
        sources = [Source(run, library.certified(run.artifact_id)) for run in plan.runs]
        request.wall["certify_s"] = time.perf_counter() - request.started - request.wall["match_s"]
        return sources

    def _reusing(self, request: _Request, sources: list[Source], room: int) -> tuple[Tensor, Session]:
        started = time.perf_counter()
        geometry, ids = self.model.geometry, request.token_ids
        runs = [source.run for source in sources]
        session = segmented_session(geometry, runs, len(ids), room)
        if self.profile.reuses_rows:
            restore(session, sources, geometry)
        request.wall["restore_s"] = time.perf_counter() - started
        request.rows = choose_rows(self.model, session, runs, ids, self.profile, request.counters)
        logits = prefill_reusing(self.model, session, sources, request.rows, ids, self.profile, request.counters)
        request.wall["ttft_forward_s"] = time.perf_counter() - started
        return logits, session

    def _continue(self, session: Session, first: int, max_new_tokens: int, stop_at_eos: bool) -> list[int]:
        """Greedy tokens from the first one on, without the end-of-sequence token."""
        stops = self.model.geometry.eos_token_ids if stop_at_eos else ()
        tokens: list[int] = []
        token = first
        if session.segments[-1].closed:
            tail = Segment(session.length, 0, 0, closed=False)
            allocate(tail, self.model.geometry, max_new_tokens)
            session.segments.append(tail)
        while token not in stops:
            tokens.append(token)
            if len(tokens) == max_new_tokens:
                break
            token = int(decode(self.model, [session], torch.tensor([token]), Counters())[0].argmax())
        return tokens

    def _report(self, request: _Request) -> Report:
        reused = request.rows is not None and request.reason is None
        documents = _document_reports(request) if request.plan is not None else ()
        total = len(request.token_ids)
        return Report(
            arm="reuse" if reused else "dense",
            profile=self.profile.name,
            profile_digest=self.profile.digest(),
            reason=request.reason,
            detail=request.detail,
            prompt_tokens=total,
            reused_tokens=sum(document.reused for document in documents),
            documents=documents,
            counters=request.counters,
            ledgers=ledgers(self.model.geometry, self.profile, total, request.counters, request.wall),
            ttft_forward_s=request.wall["ttft_forward_s"],
            ttft_request_s=request.wall["ttft_request_s"],
        )


def _document_reports(request: _Request) -> tuple[DocumentReport, ...]:
    """Rows reused and recomputed of each document, from the rows that ran."""
    assert request.plan is not None
    out = []
    for document in request.plan.documents:
        reused = 0
        if document.reason is None and request.rows is not None and request.reason is None:
            running = request.rows.running[document.start : document.start + document.length]
            reused = document.length - int(running.sum())
        out.append(
            DocumentReport(
                document.artifact_id,
                document.start,
                document.length,
                reused,
                document.length - reused,
                document.reason,
            )
        )
    return tuple(out)


def _check_ids(ids: list[int], geometry: Geometry, room: int) -> None:
    if not ids:
        raise InputError("the request is empty; give at least one token")
    if min(ids) < 0 or max(ids) >= geometry.vocab_size:
        raise InputError(f"token ids must be in [0, {geometry.vocab_size}), found {min(ids)}..{max(ids)}")
    if len(ids) + room > geometry.max_positions:
        raise InputError(
            f"{len(ids)} prompt tokens and {room} new ones exceed the model's {geometry.max_positions} positions"
        )


def _check_profile(profile: Profile, geometry: Geometry) -> None:
    """Refuse a profile that this geometry cannot run."""
    problem = ""
    if 2 * profile.fence_layers > geometry.num_layers:
        problem = f"{profile.fence_layers} fence layers at each end of {geometry.num_layers} layers"
    if max(profile.global_heads) >= geometry.heads_per_group:
        problem = f"Global head {max(profile.global_heads)} in groups of {geometry.heads_per_group}"
    if problem:
        raise Refused(RequestReason.UNSUPPORTED_MODEL, f"profile {profile.name} does not fit the model: {problem}")
