"""What a serving engine counts beside its reports: pages, running requests, refusals and failures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from redknot.errors import RequestReason, ReuseUnavailableError
from redknot.latents.handles import PoolFullError
from redknot.runtime.library import Refused
from redknot.runtime.metrics import Metrics
from redknot.serving.batch import Ask, Piece
from redknot.serving.engine import ServingEngine
from tests.kit.miniserver import MiniServer
from tests.kit.requests import document
from tests.runtime.test_metrics import samples
from tests.serving.conftest import World
from tests.serving.test_engine import OFF, PAGES, prompt

RANK = "{tp_rank=0}"


@pytest.fixture
def engine(world: World) -> Iterator[ServingEngine]:
    options = {"pages": PAGES, "requests": 4, "context": 1024, "metrics": Metrics(rank=0)}
    with ServingEngine(world.checkpoint, world.store, "turbo", **options) as made:
        yield made


def test_pages_and_running_requests(world, engine):
    server = MiniServer(engine, PAGES)
    job = server.submit("a", prompt(world, 3), 4)
    assert samples(engine.metrics)[f"redknot_requests_running{RANK}"] == 1
    server.run()
    found = samples(engine.metrics)
    assert found[f"redknot_requests_running{RANK}"] == 0
    assert found[f"redknot_pages_kept_total{RANK}"] == found[f"redknot_pages{RANK}"] == job.at // engine.page_tokens
    assert found["redknot_requests_total{arm=reuse,tp_rank=0}"] == 1
    assert found["redknot_phase_seconds_count{phase=read_wait,tp_rank=0}"] == 1
    assert found["redknot_phase_seconds_count{phase=restore,tp_rank=0}"] == 1
    engine.clear_pages()
    found = samples(engine.metrics)
    assert found[f"redknot_pages{RANK}"] == 0
    assert found[f"redknot_pages_lost_total{RANK}"] == 0


def test_a_page_without_room_is_lost(world, engine, monkeypatch):
    def full(*_: object) -> None:
        raise PoolFullError("no room")

    monkeypatch.setattr(engine._pages, "_written", full)
    job = MiniServer(engine, PAGES).answer("a", prompt(world, 3), 2, OFF)
    assert job.failure is None
    found = samples(engine.metrics)
    assert found[f"redknot_pages_lost_total{RANK}"] == job.at // engine.page_tokens
    assert found[f"redknot_pages_kept_total{RANK}"] == 0


def test_refused_and_failed_requests(world, engine, monkeypatch):
    """A request that requires reuse and has none is refused, at admission or later, and did not fail."""
    refused = "redknot_requests_refused_total{{reason={},tp_rank=0}}"
    with pytest.raises(ReuseUnavailableError):
        engine.admit("x", document(60, 1), Ask(reuse="required"))
    server = MiniServer(engine, PAGES)
    late = server.submit("late", prompt(world, 3), 2, Ask(reuse="required"))
    monkeypatch.setattr("redknot.runtime.reading.Reading.ready", _late)
    server.run()
    assert late.failure is not None
    monkeypatch.setattr(engine._rows, "prefill", _broken)
    assert server.answer("bad", prompt(world, 1), 2, OFF).failure is not None
    found = samples(engine.metrics)
    assert found[refused.format("nothing_to_reuse")] == 1
    assert found[refused.format("section_late")] == 1
    assert found[f"redknot_request_failures_total{RANK}"] == 1
    assert found["redknot_requests_total{arm=dense,tp_rank=0}"] == 0


def test_what_was_refused_and_runs_all_the_same_is_not_counted(world, engine):
    """SGLang runs one token of a request that could not be admitted."""
    outcome = engine.forward([Piece("x", 0, 1, torch.tensor([0]), [0], [1], final=True)])
    engine.release("x")
    assert (outcome.reports, outcome.failures) == ({}, {})
    assert all(not value for name, value in samples(engine.metrics).items() if "requests_total" in name)


def test_a_fault_at_admission_is_a_failure(world, engine, monkeypatch):
    monkeypatch.setattr(engine._admissions, "admit", _broken)
    with pytest.raises(RuntimeError):
        engine.admit("x", document(60, 1), Ask())
    assert samples(engine.metrics)[f"redknot_request_failures_total{RANK}"] == 1


def _late(*_: object) -> None:

    raise Refused(RequestReason.SECTION_LATE, "too late")


def _broken(*_: object) -> None:
    raise RuntimeError("the disk is on fire")
