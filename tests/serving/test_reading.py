"""Artifacts that are late, damaged, replaced or deleted between a request's admission and its turn."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator

import pytest

from redknot.artifact.loaded import LoadedArtifact
from redknot.artifact.store import ArtifactStore
from redknot.errors import StoreError
from redknot.serving.batch import Ask
from redknot.serving.engine import ServingEngine
from redknot.serving.reading import LEAST_WAIT_S, Rate
from tests.kit.miniserver import MiniServer
from tests.serving.conftest import World
from tests.serving.test_engine import OFF, PAGES, agrees, prompt


@pytest.fixture
def engine(world: World, tmp_path) -> Iterator[ServingEngine]:
    """Over a store of its own."""
    shutil.copytree(world.store, tmp_path / "store")
    options = {"pages": PAGES, "requests": 4, "context": 1024, "read_timeout_s": 2.0}
    with ServingEngine(world.checkpoint, tmp_path / "store", "turbo", **options) as made:
        yield made
        assert made.check_books() == []


def test_a_section_damaged_while_the_request_waited(world, engine, tmp_path):
    server = MiniServer(engine, PAGES)
    ids = prompt(world, 3)
    hold(engine)
    job = server.submit("a", ids, 6)
    assert job.key is not None
    for path in (tmp_path / "store").rglob("latents.*.safetensors"):
        path.write_bytes(path.read_bytes()[:-4])
    release(engine)
    server.run()
    assert job.report["arm"] == "dense"
    assert job.report["reason"] == "corrupt_section"
    dense = server.answer("b", ids, 6, OFF)
    assert dense.cached == 0
    assert agrees(job, dense.answer)


def test_a_late_section_is_waited_for_as_long_as_it_pays(world, engine, monkeypatch):
    server = MiniServer(engine, PAGES)
    ids = prompt(world, 3)
    hold(engine)
    job = server.submit("a", ids, 6)
    started = time.perf_counter()
    server.run()
    assert time.perf_counter() - started >= LEAST_WAIT_S
    assert job.report["reason"] == "section_late"
    assert "recomputing is faster" in job.report["detail"]
    release(engine)
    hold(engine)
    other = server.submit("b", ids, 6)
    threading.Timer(0.2, release, (engine,)).start()
    server.run()
    assert other.report["arm"] == "reuse"
    assert other.report["ledgers"]["wall_clock"]["read_wait_s"] >= 0.15


def test_a_required_reuse_that_fails_late_is_an_error(world, engine):
    server = MiniServer(engine, PAGES)
    hold(engine)
    job = server.submit("a", prompt(world, 3), 6, Ask(reuse="required"))
    server.run()
    release(engine)
    assert job.failure is not None
    assert "section_late" in job.failure


def test_a_document_deleted_while_a_request_runs(world, engine, tmp_path):
    server = MiniServer(engine, PAGES, 32)
    ids = prompt(world, 3)
    alone = server.answer("alone", ids, 20)
    engine.clear_pages()
    server = MiniServer(engine, PAGES, 32)
    job = server.submit("a", ids, 20)
    server.step()
    with ArtifactStore(tmp_path / "store") as store:
        for row in store.list():
            store.remove(row.artifact_id, row.namespace)
    server.run()
    assert job.report["arm"] == "reuse"
    assert agrees(job, alone.answer)
    after = server.answer("after", ids, 6)
    assert after.report["reason"] == "nothing_to_reuse"
    assert after.cached == 0


def test_time_that_rows_would_take():
    rate = Rate()
    assert rate.seconds_of(1e9) == 0
    rate.add(2_000_000, 0.5)
    assert rate.seconds_of(4e6) == 1.0


def hold(engine: ServingEngine) -> None:
    """Nothing is read until ``release``."""
    gate = threading.Event()
    engine._gate = gate  # type: ignore[attr-defined]
    native = LoadedArtifact.section

    def late(artifact, name):
        if threading.current_thread().name.startswith("redknot-read") and not gate.wait(30):
            raise StoreError("never released")
        return native(artifact, name)

    engine._native = native  # type: ignore[attr-defined]
    LoadedArtifact.section = late  # type: ignore[method-assign]


def release(engine: ServingEngine) -> None:
    engine._gate.set()  # type: ignore[attr-defined]
    LoadedArtifact.section = engine._native  # type: ignore[attr-defined,method-assign]
