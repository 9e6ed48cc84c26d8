"""/metrics of a server of two ranks: each rank's own counts, as its reports have them, and nothing missing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from redknot.artifact.counters import COUNTER_NAMES as STORE_COUNTERS
from redknot.latents.books import MEMORY_COUNTERS
from redknot.runtime.metrics import PHASES, Metrics
from tests.e2e.server.conftest import World
from tests.kit.server import Server, serving
from tests.runtime.test_metrics import parsed

RANKS = 2
QUESTION = "\nQuestion: What"


@pytest.fixture(scope="module")
def server(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--enable-metrics", "--tp-size", RANKS, "--context-length", 4096, "--max-total-tokens", 16384)
    with serving(tmp_path_factory.mktemp("metrics"), world.store, *options) as found:
        yield found


def body(prompt: str, **redknot: Any) -> dict[str, Any]:
    return {"model": "nano", "prompt": prompt, "max_tokens": 2, "custom_params": {"redknot": redknot}}


def ask(server: Server, prompt: str, **redknot: Any) -> dict[str, Any]:
    """The report of a request that is answered."""
    report: dict[str, Any] = server.post("/v1/completions", body(prompt, **redknot))["metadata"]["redknot"][0]
    return report


def scraped(server: Server) -> dict[str, float]:
    return parsed(server.get("/metrics"))


def at_rest(server: Server) -> dict[str, float]:
    """A scrape of a server that has ended what it sends to itself: a warm-up, and a request for each health check."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        before = scraped(server)
        time.sleep(2)
        after = scraped(server)
        running = [f"redknot_requests_running{{tp_rank={rank}}}" for rank in range(RANKS)]
        names = [f"redknot_requests_total{{arm=dense,tp_rank={rank}}}" for rank in range(RANKS)]
        if all(before[name] == after[name] for name in names) and not any(after[name] for name in running):
            return after
    raise AssertionError("the server never came to rest")


def settled(server: Server, name: str, value: float) -> dict[str, float]:
    """A scrape of which a level has come to a value: a rank publishes it a moment later."""
    deadline = time.monotonic() + 30
    while (found := scraped(server)).get(name) != value and time.monotonic() < deadline:
        time.sleep(0.2)
    assert found.get(name) == value
    return found


def test_counts_are_those_of_the_reports(server: Server, world: World) -> None:
    before = at_rest(server)
    one, two, three, four = list(world.texts.values())[:4]
    reports = [
        ask(server, one + two + QUESTION),
        ask(server, one + two + QUESTION),  # its pages are in the prefix cache
        ask(server, three + four + QUESTION, reuse="off"),
        ask(server, "Hello."),
    ]
    server.refused("/v1/completions", body("Good morning.", reuse="required"))
    server.refused("/v1/completions", body("Good morning.", reuse="perhaps"))
    assert [report["arm"] for report in reports] == ["reuse", "reuse", "dense", "dense"]
    assert reports[1]["cached_tokens"] > 0
    after = settled(server, "redknot_requests_running{tp_rank=1}", 0)

    def grown(name: str, labels: str, rank: int) -> float:
        key = f"redknot_{name}{{{','.join(sorted(filter(None, [labels, f'tp_rank={rank}'])))}}}"
        return after[key] - before[key]

    for arm in ("reuse", "dense"):
        of_arm = [report for report in reports if report["arm"] == arm]
        for rank in range(RANKS):
            assert grown("requests_total", f"arm={arm}", rank) == 2
            for name, key in (("head_rows_saved", "saved"), ("head_rows", "whole")):
                counted = sum(report["ledgers"]["head_rows"][key] for report in of_arm)
                assert grown(f"{name}_total", f"arm={arm}", rank) == counted
            ran = sum(report["counters"]["row_layers"] for report in of_arm)
            assert grown("row_layers_run_total", f"arm={arm}", rank) == ran
            assert grown("ttft_request_seconds_count", f"arm={arm}", rank) == 2
        # Arithmetic is each rank's own, and a report is rank 0's.
        assert grown("flops_run_total", f"arm={arm}", 0) == sum(report["counters"]["flops"] for report in of_arm)
        assert grown("flops_run_total", f"arm={arm}", 1) > 0
    for rank in range(RANKS):
        assert grown("fallbacks_total", "reason=reuse_off", rank) == 1
        assert grown("fallbacks_total", "reason=nothing_to_reuse", rank) == 1
        assert grown("requests_refused_total", "reason=nothing_to_reuse", rank) == 1
        assert grown("request_failures_total", "", rank) == 0
        assert grown("certificates_validated_total", "", rank) == sum(report["certified"] for report in reports)
        assert grown("phase_seconds_count", "phase=match", rank) == 3
        assert grown("store_bytes_verified_total", "", rank) > 0
        assert grown("latents_installs_total", "", rank) > 0
        assert grown("pages_kept_total", "", rank) > 0


def test_nothing_is_missing(server: Server) -> None:
    """Every metric that an embedded engine has, for every rank, and those of the process that speaks HTTP."""
    embedded = Metrics()
    embedded.watch("latents", lambda: dict.fromkeys(MEMORY_COUNTERS, 0))
    embedded.watch("store", lambda: dict.fromkeys(STORE_COUNTERS, 0))
    embedded.watch("index", lambda: {"match_collisions": 0, "match_cut_short": 0})
    expected = {name for name in parsed(embedded.exposition()) if "_created" not in name}
    expected |= {f"redknot_phase_seconds_count{{phase={phase}}}" for phase in PHASES}
    expected |= {
        f"redknot_latents_bytes{{state={state},tier={tier}}}"
        for state in ("free", "live", "quarantined")
        for tier in ("device", "host", "arena")
    }
    expected |= {"redknot_pages", "redknot_pages_kept_total", "redknot_pages_lost_total", "redknot_requests_running"}
    ask(server, "Hello.")
    found = scraped(server)
    for rank in range(RANKS):
        assert [name for name in sorted(expected) if with_rank(name, rank) not in found] == []
    assert any(name.startswith("sglang:time_to_first_token_seconds") for name in found)


def test_levels_fall(server: Server, world: World) -> None:
    ask(server, world.texts["document-00"] + QUESTION)
    assert scraped(server)["redknot_pages{tp_rank=0}"] > 0
    server.flush()
    for rank in range(RANKS):
        settled(server, f"redknot_pages{{tp_rank={rank}}}", 0)


def with_rank(name: str, rank: int) -> str:
    head, _, labels = name.rstrip("}").partition("{")
    return f"{head}{{{','.join(sorted([*filter(None, labels.split(',')), f'tp_rank={rank}']))}}}"
