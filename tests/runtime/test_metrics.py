"""Metrics: what a scrape shows after requests, and that known labels are there from the start."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from redknot.errors import DocumentReason, RequestReason
from redknot.latents.books import Book
from redknot.latents.workspace import Held
from redknot.runtime.counters import Counters
from redknot.runtime.ledger import Ledgers, Saving
from redknot.runtime.metrics import ARMS, PHASES, Metrics
from redknot.runtime.report import Report

LEDGERS = Ledgers(Saving(30, 100), Saving(4, 10), Saving(600, 1000), {"ttft_forward_s": 0.2})


@dataclass(frozen=True)
class Document:
    reused: int
    recomputed: int
    reason: DocumentReason | None = None


@dataclass(frozen=True)
class Request:
    arm: str = "reuse"
    reason: RequestReason | None = None
    documents: tuple[Document, ...] = ()
    ledgers: Ledgers = LEDGERS
    counters: Counters = field(
        default_factory=lambda: Counters(
            flops=400, row_layers=5, probe_row_layers=9, expert_pairs=20, expert_pairs_native=30, fan_out={3: 2, 6: 3}
        )
    )
    ttft_forward_s: float = 0.2
    ttft_request_s: float = 0.3


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample of the exposition text as ``name{label=value}``."""
    return parsed(metrics.exposition())


def parsed(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_a_reusing_request() -> None:
    metrics = Metrics()
    metrics.observe(Request(documents=(Document(90, 10), Document(0, 7, DocumentReason.TOO_SHORT))))
    metrics.observe(Request())
    found = samples(metrics)
    expected = {
        "redknot_requests_total{arm=reuse}": 2,
        "redknot_requests_total{arm=dense}": 0,
        "redknot_documents_total{outcome=reused}": 1,
        "redknot_documents_total{outcome=too_short}": 1,
        "redknot_document_tokens_total{treatment=reused}": 90,
        "redknot_document_tokens_total{treatment=recomputed}": 17,
        "redknot_head_rows_total{arm=reuse}": 200,
        "redknot_head_rows_saved_total{arm=reuse}": 60,
        "redknot_recompute_row_layers_total{arm=reuse}": 18,
        "redknot_row_layers_run_total{arm=reuse}": 10,
        "redknot_recompute_flops_total{arm=reuse}": 2000,
        "redknot_flops_run_total{arm=reuse}": 800,
        "redknot_expert_pairs_native_total{arm=reuse}": 60,
        "redknot_expert_pairs_run_total{arm=reuse}": 40,
        "redknot_fan_out_rows_total{experts=3}": 4,
        "redknot_fan_out_rows_total{experts=6}": 6,
        "redknot_ttft_forward_seconds_count{arm=reuse}": 2,
        "redknot_ttft_forward_seconds_bucket{arm=reuse,le=0.1}": 0,
        "redknot_ttft_forward_seconds_bucket{arm=reuse,le=0.25}": 2,
        "redknot_ttft_request_seconds_bucket{arm=reuse,le=0.25}": 0,
        "redknot_ttft_request_seconds_bucket{arm=reuse,le=0.5}": 2,
        "redknot_ttft_request_seconds_count{arm=dense}": 0,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["redknot_ttft_request_seconds_sum{arm=reuse}"] == pytest.approx(0.6)
    assert sum(value for name, value in found.items() if name.startswith("redknot_fallbacks_total")) == 0


def test_a_dense_request_names_its_reason() -> None:
    """A document that was fine is not counted as reused; arithmetic below zero is a sum like any other."""
    metrics = Metrics()
    nothing = Ledgers(Saving(0, 100), Saving(0, 10), Saving(-50, 1000), {})
    documents = (Document(0, 100), Document(0, 50, DocumentReason.NO_MATCH))
    metrics.observe(
        Request("dense", RequestReason.CORRUPT_SECTION, documents, nothing, Counters(flops=1050, row_layers=10))
    )
    found = samples(metrics)
    assert found["redknot_fallbacks_total{reason=corrupt_section}"] == 1
    assert found["redknot_documents_total{outcome=reused}"] == 0
    assert found["redknot_documents_total{outcome=request_dense}"] == 1
    assert found["redknot_documents_total{outcome=no_match}"] == 1
    assert found["redknot_flops_run_total{arm=dense}"] == 1050
    assert found["redknot_recompute_flops_total{arm=dense}"] == 1000
    assert found["redknot_recompute_row_layers_total{arm=dense}"] == 10


def test_a_refused_request_is_counted_with_its_reason_and_nowhere_else() -> None:
    metrics = Metrics()
    for reason in (RequestReason.NOTHING_TO_REUSE, RequestReason.NOTHING_TO_REUSE, RequestReason.CORRUPT_SECTION):
        metrics.refused(reason)
    assert {name: value for name, value in samples(metrics).items() if value and "_created" not in name} == {
        "redknot_requests_refused_total{reason=nothing_to_reuse}": 2,
        "redknot_requests_refused_total{reason=corrupt_section}": 1,
    }


def test_certificates() -> None:
    metrics = Metrics()
    for refused in (None, None, RequestReason.IDENTITY_MISMATCH):
        metrics.certificate(refused)
    found = samples(metrics)
    assert found["redknot_certificates_validated_total"] == 2
    assert found["redknot_certificates_refused_total{reason=identity_mismatch}"] == 1


def test_watched_counts_are_summed_when_scraped() -> None:
    """Two engines with one ``Metrics`` have a store each; what neither counts is absent."""
    metrics = Metrics()
    first, second = {"loads": 1}, {"loads": 10, "io_errors": 0}
    assert not any(name.startswith("redknot_store") for name in samples(metrics))
    for counts in (first, second):
        metrics.watch("store", counts.copy if counts is second else lambda: first)
    first["loads"] += 1
    found = samples(metrics)
    assert {
        name: value for name, value in found.items() if name.startswith("redknot_store") and "_created" not in name
    } == {
        "redknot_store_loads_total": 12,
        "redknot_store_io_errors_total": 0,
    }
    assert "# TYPE redknot_store_loads_total counter" in metrics.exposition()


def test_books_are_summed_when_scraped() -> None:
    metrics, live = Metrics(), [10]
    for _ in range(2):
        metrics.watch_books(lambda: {"device": Book(100, live[0], 1), "arena": Book(7, 0, 0)})
    live[0] += 5
    assert {name: value for name, value in samples(metrics).items() if "latents" in name} == {
        "redknot_latents_bytes{state=free,tier=device}": 2 * 84,
        "redknot_latents_bytes{state=live,tier=device}": 2 * 15,
        "redknot_latents_bytes{state=quarantined,tier=device}": 2,
        "redknot_latents_bytes{state=free,tier=arena}": 14,
        "redknot_latents_bytes{state=live,tier=arena}": 0,
        "redknot_latents_bytes{state=quarantined,tier=arena}": 0,
    }


def test_levels_are_summed_and_may_fall() -> None:
    metrics, held = Metrics(), [3, 4]
    for number in range(2):
        metrics.watch_level("pages", "Pages.", lambda number=number: held[number])
    assert samples(metrics)["redknot_pages"] == 7
    held[0] = 0
    assert samples(metrics)["redknot_pages"] == 4


def test_parts_of_requests_by_timer() -> None:
    """What a request did not do is not in the count; its TTFTs are metrics of their own."""
    metrics = Metrics()
    wall = {"match_s": 0.002, "read_wait_s": 0.2, "ttft_forward_s": 0.1, "ttft_request_s": 0.4}
    metrics.observe(Request(ledgers=Ledgers(Saving(0, 1), Saving(0, 1), Saving(0, 1), wall)))
    found = samples(metrics)
    counts = {phase: found[f"redknot_phase_seconds_count{{phase={phase}}}"] for phase in PHASES}
    assert counts == dict.fromkeys(PHASES, 0) | {"match": 1, "read_wait": 1}
    assert found["redknot_phase_seconds_sum{phase=read_wait}"] == pytest.approx(0.2)


def test_a_publisher_brings_what_is_watched_up_to_date() -> None:
    """Read from the metric itself, as a scrape of another process does: nothing publishes first."""
    metrics, counts = Metrics(), {"loads": 1}
    metrics.watch("store", lambda: counts)
    loads = metrics.registry.restricted_registry(["redknot_store_loads_total"])
    publisher = metrics.publish_every(0.01)
    counts["loads"] = 5
    deadline = time.monotonic() + 10
    while _only(loads) != 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _only(loads) == 5
    publisher.close()
    counts["loads"] = 6
    assert _only(loads) == 5


def _only(registry: Collector) -> float:
    return next(s.value for family in registry.collect() for s in family.samples if s.name.endswith("_total"))


def events(metrics: Metrics, rank: int) -> None:
    """One of everything, as rank ``rank`` sees it."""
    counts = {"loads": 1 + rank, "io_errors": 0}
    metrics.watch("store", lambda: counts)
    metrics.watch_books(lambda: {"device": Book(100, 10 + rank, 1)})
    metrics.watch_level("pages", "Pages.", lambda: 7 + rank)
    documents = (Document(90, 10), Document(0, 7, DocumentReason.TOO_SHORT))
    wall = {f"{phase}_s": 0.1 for phase in PHASES}
    counts["loads"] += 10
    metrics.observe(Request(documents=documents, ledgers=replace(LEDGERS, wall_clock=wall)))
    metrics.observe(Request("dense", RequestReason.REUSE_OFF))
    metrics.refused(RequestReason.NOTHING_TO_REUSE)
    metrics.failed()
    metrics.certificate(None)
    metrics.certificate(RequestReason.CORRUPT_SECTION)


def test_ranks_in_one_exposition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes as a server has them: each rank's own counts, nothing missing that one process would show."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    ranks = [multiprocessing.get_context("spawn").Process(target=_rank, args=(rank,)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    found = parsed(generate_latest(registry).decode())
    for rank in range(2):
        alone = Metrics()
        events(alone, rank)
        expected = {_with(name, f"tp_rank={rank}"): value for name, value in samples(alone).items()}
        assert {name: found[name] for name in expected if "_created" not in name} == {
            name: value for name, value in expected.items() if "_created" not in name
        }
    assert len(found) == 2 * sum("_created" not in name for name in samples(alone))
    assert found["redknot_store_loads_total{tp_rank=1}"] == 12
    assert found["redknot_latents_bytes{state=live,tier=device,tp_rank=1}"] == 11


def _rank(rank: int) -> None:
    events(Metrics(rank=rank), rank)


def _with(name: str, label: str) -> str:
    head, _, labels = name.rstrip("}").partition("{")
    return f"{head}{{{','.join(sorted([*filter(None, labels.split(',')), label]))}}}"


def test_known_labels_start_at_zero() -> None:
    found = samples(Metrics())
    names = [f"redknot_fallbacks_total{{reason={reason}}}" for reason in RequestReason]
    names += [f"redknot_certificates_refused_total{{reason={reason}}}" for reason in RequestReason]
    names += [f"redknot_requests_refused_total{{reason={reason}}}" for reason in RequestReason]
    names += [f"redknot_documents_total{{outcome={reason}}}" for reason in DocumentReason]
    names += [f"redknot_{unit}_total{{arm={arm}}}" for unit in ("requests", "flops_run", "head_rows") for arm in ARMS]
    assert all(found[name] == 0 for name in names)


def test_registries() -> None:
    """Each has its own by default; two in one registry would count twice, so that is refused."""
    first, second = Metrics(), Metrics()
    first.observe(Request())
    assert samples(second)["redknot_requests_total{arm=reuse}"] == 0
    registry = CollectorRegistry()
    assert Metrics(registry).registry is registry
    with pytest.raises(ValueError, match="Duplicated"):
        Metrics(registry)


def test_the_runtimes_report_is_observed() -> None:
    fields = {name: getattr(Request(), name) for name in ("arm", "reason", "documents", "ledgers", "counters")}
    report = Report(
        **fields,
        profile="turbo",
        profile_digest="0",
        detail="",
        prompt_tokens=10,
        cached_tokens=0,
        reused_tokens=0,
        forwarded_rows=10,
        certified=0,
        bounds=None,
        latents=Held(1, 2, 3, 4, block_bytes=10, arena_bytes=5),
        ttft_forward_s=0.1,
        ttft_request_s=0.2,
    )
    assert report.to_dict()["latents"] == {
        "found": 1,
        "filled": 2,
        "copied": 3,
        "fresh": 4,
        "block_bytes": 10,
        "arena_bytes": 5,
        "shared_bytes": 30,
        "own_bytes": 75,
    }
    metrics = Metrics()
    metrics.observe(report)
    assert samples(metrics)["redknot_requests_total{arm=reuse}"] == 1
