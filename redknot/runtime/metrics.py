"""Prometheus metrics: the sums of what requests report, under names that begin with ``redknot_``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, generate_latest

from redknot.errors import DocumentReason, RequestReason
from redknot.latents.books import Book
from redknot.model.profile import ARMS
from redknot.runtime.counters import Counters
from redknot.runtime.families import Families, Family
from redknot.runtime.ledger import Ledgers
from redknot.runtime.watched import Publisher, PublishFirst, Watched

REUSED = "reused"
REQUEST_DENSE = "request_dense"  # nothing was wrong with the document; the whole request ran dense
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
PHASES = ("match", "certify", "read_wait", "restore", "windows")  # of the wall-clock ledger, beside the two TTFTs
PHASE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class ObservedDocument(Protocol):
    """What is counted of one document of a request."""

    @property
    def reused(self) -> int:
        """Tokens read from its artifact."""

    @property
    def recomputed(self) -> int:
        """Tokens that ran."""

    @property
    def reason(self) -> DocumentReason | None:
        """Why it was new text."""


class Observed(Protocol):
    """What is counted of one request; ``redknot.runtime.report.Report`` is one."""

    @property
    def arm(self) -> str:
        """One of ``ARMS``."""

    @property
    def reason(self) -> RequestReason | None:
        """Why it ran dense."""

    @property
    def documents(self) -> Sequence[ObservedDocument]:
        """Its documents, found or named."""

    @property
    def ledgers(self) -> Ledgers:
        """What it saved."""

    @property
    def counters(self) -> Counters:
        """What its prefill ran."""

    @property
    def ttft_forward_s(self) -> float:
        """Seconds from prefill entry to the first token."""

    @property
    def ttft_request_s(self) -> float:
        """Seconds from the call to the first token."""


class Metrics:
    """Sums over requests, in a registry of their own unless one is given (names must be free in it).

    A saving is 1 - run / recompute (for head-rows: saved / whole), within one unit only. Safe to use from threads.
    ``rank`` is for a process whose metrics are put together with those of other ranks; each has it as a label.
    """

    def __init__(self, registry: CollectorRegistry | None = None, rank: int | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        families = Families(self.registry, rank)
        PublishFirst(self.registry, self.publish)
        self._watched = Watched(families)
        self._requests = families.counter("requests", "Requests answered.", "arm")
        self._fallbacks = families.counter("fallbacks", "Requests that ran dense, by reason.", "reason")
        self._requests_refused = families.counter(
            "requests_refused",
            "Requests that required reuse and were refused instead of answered, by reason.",
            "reason",
        )
        self._failures = families.counter("request_failures", "Requests that failed inside the engine.")
        self._documents = families.counter("documents", "Documents of requests: reused, or why not.", "outcome")
        self._document_tokens = families.counter(
            "document_tokens", "Tokens of documents, by what was done.", "treatment"
        )
        self._validated = families.counter("certificates_validated", "Certificates that held.")
        self._refused = families.counter("certificates_refused", "Certificates that did not hold, by reason.", "reason")
        self._head_rows = families.counter("head_rows", "Head-rows of requests: layers x tokens x heads.", "arm")
        self._head_rows_saved = families.counter(
            "head_rows_saved",
            "Local head-rows of middle layers not run; 0 of a request that ran more for windows than it skipped.",
            "arm",
        )
        self._row_layers = families.counter("recompute_row_layers", "Row-layers that recompute would have run.", "arm")
        self._row_layers_run = families.counter("row_layers_run", "Row-layers that ran, probes not counted.", "arm")
        self._window_row_layers = families.counter(
            "window_row_layers", "Of these, for windows that no artifact kept.", "arm"
        )
        self._flops = families.counter("recompute_flops", "FLOPs that recompute would have run.", "arm")
        self._flops_run = families.counter("flops_run", "FLOPs that ran, probes and merges included.", "arm")
        self._pairs = families.counter("expert_pairs_native", "(row, expert) pairs the native router chose.", "arm")
        self._pairs_run = families.counter("expert_pairs_run", "(row, expert) pairs that ran on this rank.", "arm")
        self._fan_out = families.counter(
            "fan_out_rows", "Row-layers by the number of routed experts they ran.", "experts"
        )
        self._ttft_forward = families.histogram(
            "ttft_forward_seconds", "Prefill entry to first token.", TTFT_BUCKETS, "arm"
        )
        self._ttft_request = families.histogram(
            "ttft_request_seconds", "Call to first token: match, vote, load included.", TTFT_BUCKETS, "arm"
        )
        self._phases = families.histogram(
            "phase_seconds",
            "Parts of requests by timer; read_wait is what a request waited for its artifacts.",
            PHASE_BUCKETS,
            "phase",
        )
        self._show_zeros()

    def observe(self, report: Observed) -> None:
        """Count one answered request."""
        arm, ran, saved = report.arm, report.counters, report.ledgers
        self._requests.labels(arm).inc()
        if report.reason is not None:
            self._fallbacks.labels(report.reason.value).inc()
        for document in report.documents:
            self._documents.labels(_outcome(report.reason, document.reason)).inc()
            self._document_tokens.labels("reused").inc(document.reused)
            self._document_tokens.labels("recomputed").inc(document.recomputed)
        self._head_rows.labels(arm).inc(saved.head_rows.whole)
        self._head_rows_saved.labels(arm).inc(max(saved.head_rows.saved, 0))
        self._row_layers.labels(arm).inc(ran.row_layers + saved.token_rows.saved)
        self._row_layers_run.labels(arm).inc(ran.row_layers)
        self._window_row_layers.labels(arm).inc(ran.window_row_layers)
        self._flops.labels(arm).inc(saved.arithmetic.whole)
        self._flops_run.labels(arm).inc(ran.flops)
        self._pairs.labels(arm).inc(ran.expert_pairs_native)
        self._pairs_run.labels(arm).inc(ran.expert_pairs)
        for experts, rows in ran.fan_out.items():
            self._fan_out.labels(str(experts)).inc(rows)
        self._ttft_forward.labels(arm).observe(report.ttft_forward_s)
        self._ttft_request.labels(arm).observe(report.ttft_request_s)
        for name, seconds in saved.wall_clock.items():
            if (phase := name.removesuffix("_s")) in PHASES:
                self._phases.labels(phase).observe(seconds)
        self.publish()

    def refused(self, reason: RequestReason) -> None:
        """Count one request that required reuse and got no answer; it is in no other count of requests."""
        self._requests_refused.labels(reason.value).inc()

    def failed(self) -> None:
        """Count one request that got an error instead of an answer."""
        self._failures.labels().inc()

    def certificate(self, refused: RequestReason | None) -> None:
        """Count one certificate that was checked: it held, or the reason it did not."""
        if refused is None:
            self._validated.labels().inc()
        else:
            self._refused.labels(refused.value).inc()

    def watch(self, prefix: str, counts: Callable[[], Mapping[str, int]]) -> None:
        """Show what ``counts`` returns, which never falls, as ``redknot_<prefix>_<name>_total``."""
        self._watched.add_counts(prefix, counts)

    def watch_level(self, name: str, meaning: str, level: Callable[[], float]) -> None:
        """Show what ``level`` returns now as ``redknot_<name>``."""
        self._watched.add_level(name, meaning, level)

    def watch_books(self, books: Callable[[], Mapping[str, Book]]) -> None:
        """Show the bytes of a latent store, by tier and by what they are."""
        self._watched.add_books(books)

    def publish(self) -> None:
        """Bring what is watched up to date; a scrape of the registry does it itself."""
        self._watched.publish()

    def publish_every(self, seconds: float = 1.0) -> Publisher:
        """Do so from now on, where another process answers the scrapes."""
        return Publisher(self.publish, seconds)

    def exposition(self) -> str:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry).decode("utf-8")

    def _show_zeros(self) -> None:
        """Expose every known label from the start, so that the first event is a rise from 0."""
        for metric in (self._requests, self._head_rows, self._head_rows_saved, self._row_layers, self._row_layers_run):
            _touch(metric, ARMS)
        for metric in (self._window_row_layers, self._flops, self._flops_run, self._pairs, self._pairs_run):
            _touch(metric, ARMS)
        for metric in (self._fallbacks, self._requests_refused, self._refused):
            _touch(metric, RequestReason)
        _touch(self._documents, (REUSED, REQUEST_DENSE, *DocumentReason))
        _touch(self._document_tokens, ("reused", "recomputed"))
        for counter in (self._failures, self._validated):
            counter.labels()
        for histogram in (self._ttft_forward, self._ttft_request):
            for arm in ARMS:
                histogram.labels(arm)
        for phase in PHASES:
            self._phases.labels(phase)


def _outcome(request: RequestReason | None, document: DocumentReason | None) -> str:
    if document is not None:
        return document.value
    return REUSED if request is None else REQUEST_DENSE


def _touch(metric: Family[Counter], values: Iterable[str]) -> None:
    for value in values:
        metric.labels(str(value))
