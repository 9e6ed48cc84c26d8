"""The embedded engine: a request in, text and a report out; reuse where certificates hold, else dense, said aloud."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from redknot.artifact.loaded import LoadedArtifact
from redknot.artifact.store import ArtifactStore
from redknot.comm.group import Group, OneProcess
from redknot.config import load_settings
from redknot.errors import InputError, RequestReason, ReuseUnavailableError, StoreError
from redknot.latents.session import Session
from redknot.latents.space import LatentSpace
from redknot.model.checkpoint import load_model
from redknot.model.profile import Profile, Treatment, load_profile
from redknot.model.tokenizer import load_tokenizer
from redknot.plan.planner import Span
from redknot.plan.windows import ends
from redknot.runtime.counters import Counters
from redknot.runtime.decision import check_profile, fingerprint, plan_request
from redknot.runtime.identity import model_identity
from redknot.runtime.ledger import bounds, ledgers, recompute_flops, recompute_row_layers
from redknot.runtime.library import Library, Refused
from redknot.runtime.metrics import Metrics
from redknot.runtime.model import Model
from redknot.runtime.prefill import dense_session, greedy, prefill
from redknot.runtime.progress import Request
from redknot.runtime.report import Report, document_reports
from redknot.runtime.request import REUSE_MODES, Text, read_length, read_request
from redknot.runtime.reuse import Source, choose_rows, prefill_reusing, restored_session, segmented_session
from redknot.runtime.windows import rebuild_windows

_log = logging.getLogger(__name__)
DTYPE = torch.float32  # the CPU runs and stores float32


@dataclass(frozen=True)
class Result:
    """What a request returns."""

    text: str
    token_ids: tuple[int, ...]
    report: Report


class Engine:
    """A DeepSeek-V4 checkpoint, a store of artifacts, and one reuse profile, in this process.

    Args:
        model: folder of the checkpoint and its tokenizer.json.
        store: folder of the artifact store; None serves dense.
        profile: name of a shipped profile, or a JSON file.
        namespace: whose documents may be reused.
        group: the tensor-parallel ranks; every rank makes the same calls.

    Several threads may use it: requests run one after the other, each on all cores. What it keeps of latents, and how
    much, ``config.LatentSettings`` says; as a context manager, or with ``close``, it leaves them in the disk tier.

    Raises UnsupportedModelError, CheckpointError, ConfigError, or StoreError where the memory or folder for latents
    cannot be had; an artifact store that cannot be opened is not an error but the reason of every request
    (STORE_UNAVAILABLE).
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
        self.latents = LatentSpace(geometry, load_settings().latents, cost=partial(recompute_flops, geometry))
        self.metrics.watch("latents", self.latents.store.counters)
        self.metrics.watch_books(self.latents.store.books)
        self._namespace = namespace
        self._one_at_a_time = threading.Lock()
        self._library: Library | None = None
        self._no_library = "no store was given"  # why, while there is none
        if store is not None:
            self._open(checkpoint, Path(store), namespace)

    def _open(self, checkpoint: Path, store: Path, namespace: str) -> None:
        geometry = self.model.geometry
        try:
            opened = ArtifactStore(store)
        except StoreError as error:
            self._no_library = str(error)
            _log.warning("every request will run dense: %s", error)
            return
        identity = model_identity(checkpoint, geometry, DTYPE, load_settings().cache_dir)
        shard = self.model.group.shard
        self._library = Library(opened, identity, geometry, namespace, self.profile.needs(), shard)
        counts = self._library.index.counters
        self.metrics.watch("store", lambda: opened.counters)
        self.metrics.watch("index", lambda: counts)

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
        of running dense. Raises InputError for a malformed request, and StoreError, before anything runs, for one that
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

    def check_books(self) -> list[str]:
        """Recount the latent store: every difference from its books, one line each; none when they balance."""
        return self.latents.store.recount()

    def close(self) -> None:
        """Write cached latents to the disk tier, if there is one, and end; StoreError if the disk does not answer."""
        with self._one_at_a_time:
            self.latents.close()

    def _answer(self, request: Request, reuse: str, room: int, stop_at_eos: bool) -> Result:
        """Prefill, report, decode."""
        logits, session = self._first_logits(request, reuse, room)
        first = int(logits.argmax())
        request.wall["ttft_request_s"] = time.perf_counter() - request.started
        report = self._report(request)
        for document in report.documents:
            if document.reason is not None:
                _log.info("document at token %d is new text: %s", document.start, document.reason)
        self.metrics.observe(report)
        tokens = greedy(self.model, session, first, room, self.model.geometry.eos_token_ids if stop_at_eos else ())
        return Result(self.tokenizer.decode(tokens), tuple(tokens), report)

    def _first_logits(self, request: Request, reuse: str, room: int) -> tuple[Tensor, Session]:
        """Prefill, reusing if everything holds on every rank."""
        if reuse == "off":
            request.refuse(RequestReason.REUSE_OFF, "reuse was turned off for this request")
        else:
            sources = self._agreed_sources(request)
            if request.reason is None and (found := self._reusing(request, sources, room)) is not None:
                return found
        request.log_reason("refused" if reuse == "required" else "dense")
        if reuse == "required":
            assert request.reason is not None  # whatever leads here has named one
            self.metrics.refused(request.reason)
            raise ReuseUnavailableError(f"reuse is required but not possible: {request.reason} ({request.detail})")
        started = time.perf_counter()
        ids = request.token_ids
        session = dense_session(request.workspace_of(self.latents, self._namespace), len(ids), len(ids) + room)
        logits = prefill(self.model, [session], [ids], request.counters)[0]
        request.wall["ttft_forward_s"] = time.perf_counter() - started
        return logits, session

    def _agreed_sources(self, request: Request) -> list[Source]:
        """What to reuse, the same on every rank; else the request has its reason.

        Every rank votes before anything that only a reusing request does, on what exactly it would read: ranks
        that see the store at different moments may each be sure of another plan.
        """
        sources: list[Source] = []
        try:
            sources = self._sources(request)
        except Refused as refused:
            request.refuse(refused.reason, refused.detail)
        group = self.model.group
        total = int(group.all_reduce(torch.tensor([request.vote])).item())
        if not group.all_agree(request.reason is None and total == request.vote * group.shard.world):
            request.refuse(RequestReason.RANK_DISAGREEMENT, "the ranks could not certify the same reuse")
        return sources

    def _sources(self, request: Request) -> list[Source]:
        """Match, plan and certify; raises Refused with the reason to run dense."""
        if self._library is None:
            raise Refused(RequestReason.STORE_UNAVAILABLE, self._no_library)
        check_profile(self.profile, self.model.geometry)
        library = self._library
        library.refresh()
        request.plan = plan = plan_request(library, self.profile, request.token_ids, request.spans)
        request.wall["match_s"] = time.perf_counter() - request.started
        if not plan.runs:
            raise Refused(RequestReason.NOTHING_TO_REUSE, "no document of the request can be reused")
        artifacts: dict[str, LoadedArtifact] = {}
        for found, stops in ends(plan.runs).items():
            artifacts[found] = self._certified(library, found, stops)
            request.certified += 1
        digests = {artifact_id: artifact.certificate.digest for artifact_id, artifact in artifacts.items()}
        request.vote = fingerprint([(run, digests[run.artifact_id]) for run in plan.runs])
        request.wall["certify_s"] = time.perf_counter() - request.started - request.wall["match_s"]
        return [
            Source(run, artifacts[run.artifact_id], bytes.fromhex(digests[run.artifact_id]), library.rebuild(run))
            for run in plan.runs
        ]

    def _certified(self, library: Library, artifact_id: str, stops: Collection[int]) -> LoadedArtifact:
        """One artifact, its certificate counted."""
        try:
            artifact = library.certified(artifact_id, stops)
        except Refused as refused:
            self.metrics.certificate(refused.reason)
            raise
        self.metrics.certificate(None)
        return artifact

    def _reusing(self, request: Request, sources: list[Source], room: int) -> tuple[Tensor, Session] | None:
        """First logits by reuse; None when the profile's shares leave no row to skip, or none was skipped."""
        started = time.perf_counter()
        geometry, ids = self.model.geometry, request.token_ids
        runs = [source.run for source in sources]
        memory = request.workspace_of(self.latents, self._namespace)
        if self.profile.reuses_rows:
            session = restored_session(memory, sources, len(ids), room)
        else:
            session = segmented_session(memory, runs, len(ids), room)
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

    def _report(self, request: Request) -> Report:
        assert request.workspace is not None
        rows = request.rows if request.reason is None else None  # those of a reusing prefill
        documents = document_reports(request.plan, rows)
        total = len(request.token_ids)
        return Report(
            arm="dense" if rows is None else "reuse",
            profile=self.profile.name,
            profile_digest=self.profile.digest(),
            reason=request.reason,
            detail=request.detail,
            prompt_tokens=total,
            reused_tokens=sum(document.reused for document in documents),
            certified=request.certified,
            documents=documents,
            counters=request.counters,
            ledgers=ledgers(
                self.model.geometry, self.profile, total, request.counters, request.wall, self.model.group.shard
            ),
            bounds=None if rows is None else bounds(self.model.geometry, self.profile, rows),
            latents=request.workspace.held(),
            ttft_forward_s=request.wall["ttft_forward_s"],
            ttft_request_s=request.wall["ttft_request_s"],
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
