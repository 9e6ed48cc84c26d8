"""Artifacts are read while layers run: group by group, and never half used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from redknot.artifact.loaded import LoadedArtifact
from redknot.artifact.schema import parse_section
from redknot.errors import CorruptSectionError
from redknot.runtime import forward
from redknot.runtime.engine import Engine
from redknot.runtime.reading import GROUP_LAYERS
from tests.kit.requests import BOS, document, publish, use_cache, write_checkpoint

DOCS = [document(length, number) for number, length in enumerate((96, 160))]
IDS = [BOS, *document(5, 3), *DOCS[0], *DOCS[1], *document(17, 4)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("reading")
    patch = use_cache(folder / "cache")
    checkpoint = write_checkpoint(folder / "model")
    publish(checkpoint, folder / "store", DOCS)
    yield checkpoint, folder / "store"
    patch.undo()


@pytest.fixture(params=["turbo", "rowsparse", "combined", "headsplit"])
def engine(world: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(*world, request.param) as made:
        yield made
        assert made.check_books() == []


def sections(monkeypatch: pytest.MonkeyPatch, meddle) -> None:
    """Call ``meddle(name)`` before a thread reads a section."""
    native = LoadedArtifact.section

    def section(artifact, name):
        if threading.current_thread().name.startswith("redknot-read"):
            meddle(name)
        return native(artifact, name)

    monkeypatch.setattr(LoadedArtifact, "section", section)


def test_the_first_layers_run_before_the_last_are_read(engine, monkeypatch):
    """The last group is not read until a layer of the first one has run: a deadlock if all were waited for."""
    expected = engine.generate(token_ids=IDS, max_new_tokens=3)
    ran, native = threading.Event(), forward._layer

    def layer(model, number, *rest):
        ran.set()
        return native(model, number, *rest)

    waits = []

    def meddle(name):
        if (parse_section(name).layer or 0) >= GROUP_LAYERS:
            waits.append(name)
            assert ran.wait(20), name

    monkeypatch.setattr(forward, "_layer", layer)
    sections(monkeypatch, meddle)
    found = engine.generate(token_ids=IDS, max_new_tokens=3)
    assert bool(waits) == (engine.profile.name != "headsplit")  # which reads no layer behind the first group
    assert found.report.arm == "reuse"
    assert found.token_ids == expected.token_ids
    assert found.report.counters.rows == expected.report.counters.rows


def test_cold_and_hot_requests_answer_alike(world, engine):
    """The first request fills blocks while its rows run, the next one finds them."""
    cold = engine.generate(token_ids=IDS, max_new_tokens=6)
    hot = engine.generate(token_ids=IDS, max_new_tokens=6)
    with Engine(*world, engine.profile) as other:
        prefix = other.generate(token_ids=[*IDS[:-17], *document(9, 1)], max_new_tokens=1)
        moved = other.generate(token_ids=IDS, max_new_tokens=6)
    assert prefix.report.arm == "reuse"
    assert cold.token_ids == hot.token_ids == moved.token_ids
    held = [one.report.latents for one in (cold, hot)]
    assert held[0].filled + held[0].copied == held[1].found + held[1].copied
    assert held[0].fresh == held[1].fresh
    assert held[1].filled == 0


def test_a_section_of_the_last_layers_that_fails_leaves_nothing_behind(engine, monkeypatch):
    dense = engine.generate(token_ids=IDS, reuse="off", max_new_tokens=4)
    broken = True

    def meddle(name):
        layer = parse_section(name).layer
        if broken and layer is not None and layer >= GROUP_LAYERS:
            raise CorruptSectionError(f"{name} is damaged")

    sections(monkeypatch, meddle)
    found = engine.generate(token_ids=IDS, max_new_tokens=4)
    if engine.profile.name == "headsplit":
        assert found.report.arm == "reuse"
        return
    assert found.report.arm == "dense"
    assert str(found.report.reason) == "corrupt_section"
    assert found.token_ids == dense.token_ids
    assert found.report.counters.rows == dense.report.counters.rows
    assert found.report.ledgers.token_rows.saved == 0
    broken = False
    after = engine.generate(token_ids=IDS, max_new_tokens=4)
    assert after.report.arm == "reuse"
    with Engine(engine_checkpoint(engine), engine.library.store.root, engine.profile) as other:
        assert other.generate(token_ids=IDS, max_new_tokens=4).token_ids == after.token_ids


def engine_checkpoint(engine: Engine) -> Path:
    return engine.library.store.root.parent / "model"
