"""/metrics of a server of two ranks: each rank's own counts, as its reports have them, and nothing missing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from redknot.artifact.counters import COUNTER_NAMES as STORE_COUNTERS
from redknot.latents.books import MEMORY_COUNTERS
from redknot.runtime.metrics import PHASES, Metrics
from tests.runtime.test_metrics import parsed

requests = pytest.importorskip("requests")
pytest.importorskip("sglang")

ROOT = Path(__file__).resolve().parents[3]
RANKS = 2
QUESTION = "\nQuestion: What"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of two ranks over four documents of the examples."""
    folder = tmp_path_factory.mktemp("metrics")
    corpus = folder / "corpus"
    corpus.mkdir()
    for path in texts():
        (corpus / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "REDKNOT_CACHE_DIR": str(folder / "cache")}
    store = folder / "store"
    build = [sys.executable, "-m", "redknot", "build", str(corpus), "--store", str(store), "--tp-size", str(RANKS)]
    subprocess.run(build, cwd=ROOT, env=environment, check=True, capture_output=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", "nano", "--device", "cpu"),
        *("--enable-redknot", "--redknot-store", str(store), "--enable-metrics", "--tp-size", str(RANKS)),
        *("--host", "127.0.0.1", "--port", str(port), "--context-length", "4096"),
    ]
    with (folder / "log").open("w", encoding="utf-8") as log:
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            wait(f"http://127.0.0.1:{port}/health", server)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait(health: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert server.poll() is None
        try:
            if requests.get(health, timeout=5).status_code == 200:
                return
        except requests.RequestException:
            pass
        time.sleep(0.5)
    raise AssertionError("the server was not healthy after 240 s")


def texts() -> list[Path]:
    return sorted((ROOT / "examples/corpus").glob("*.txt"))[:4]


def ask(url: str, prompt: str, status: int = 200, **redknot: Any) -> dict[str, Any]:
    """The report of a request that is answered."""
    body = {"model": "nano", "prompt": prompt, "max_tokens": 2, "custom_params": {"redknot": redknot}}
    found = requests.post(f"{url}/v1/completions", json=body, timeout=120)
    assert found.status_code == status, found.text[:500]
    return found.json()["metadata"]["redknot"][0] if status == 200 else {}


def scraped(url: str) -> dict[str, float]:
    return parsed(requests.get(f"{url}/metrics", timeout=30).text)


def at_rest(url: str) -> dict[str, float]:
    """A scrape of a server that has ended what it sends to itself: a warm-up, and a request for each health check."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        before = scraped(url)
        time.sleep(2)
        after = scraped(url)
        running = [f"redknot_requests_running{{tp_rank={rank}}}" for rank in range(RANKS)]
        names = [f"redknot_requests_total{{arm=dense,tp_rank={rank}}}" for rank in range(RANKS)]
        if all(before[name] == after[name] for name in names) and not any(after[name] for name in running):
            return after
    raise AssertionError("the server never came to rest")


def settled(url: str, name: str, value: float) -> dict[str, float]:
    """A scrape of which a level has come to a value: a rank publishes it a moment later."""
    deadline = time.monotonic() + 30
    while (found := scraped(url)).get(name) != value and time.monotonic() < deadline:
        time.sleep(0.2)
    assert found.get(name) == value
    return found


def test_counts_are_those_of_the_reports(url: str) -> None:
    before = at_rest(url)
    one, two, three, four = (path.read_text(encoding="utf-8") for path in texts())
    reports = [
        ask(url, one + two + QUESTION),
        ask(url, one + two + QUESTION),  # its pages are in the prefix cache
        ask(url, three + four + QUESTION, reuse="off"),
        ask(url, "Hello."),
    ]
    ask(url, "Good morning.", 400, reuse="required")
    ask(url, "Good morning.", 400, reuse="perhaps")
    assert [report["arm"] for report in reports] == ["reuse", "reuse", "dense", "dense"]
    assert reports[1]["cached_tokens"] > 0
    after = settled(url, "redknot_requests_running{tp_rank=1}", 0)

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


def test_nothing_is_missing(url: str) -> None:
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
    ask(url, "Hello.")
    found = scraped(url)
    for rank in range(RANKS):
        assert [name for name in sorted(expected) if with_rank(name, rank) not in found] == []
    assert any(name.startswith("sglang:time_to_first_token_seconds") for name in found)


def test_levels_fall(url: str) -> None:
    ask(url, texts()[0].read_text(encoding="utf-8") + QUESTION)
    assert scraped(url)["redknot_pages{tp_rank=0}"] > 0
    assert requests.post(f"{url}/flush_cache", timeout=30).status_code == 200
    for rank in range(RANKS):
        settled(url, f"redknot_pages{{tp_rank={rank}}}", 0)


def with_rank(name: str, rank: int) -> str:
    head, _, labels = name.rstrip("}").partition("{")
    return f"{head}{{{','.join(sorted([*filter(None, labels.split(',')), f'tp_rank={rank}']))}}}"
