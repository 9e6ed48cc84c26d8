"""Engines over artifacts that keep window rows in each way: the same answers, who is served by what, and faults."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from redknot.artifact.certificate import Certificate
from redknot.artifact.needs import parse_strategy
from redknot.artifact.publish import Publication
from redknot.artifact.schema import generation_dir
from redknot.artifact.sections import checkpoint_section
from redknot.artifact.store import ArtifactStore
from redknot.build.capture import evaluate
from redknot.build.target import make_target
from redknot.config import LATENT_BYTES, LATENT_DISK_BYTES, load_settings
from redknot.errors import DocumentReason, RequestReason
from redknot.model.profile import SHIPPED
from redknot.runtime.counters import Counters
from redknot.runtime.engine import Engine, Result
from redknot.runtime.identity import model_identity
from tests.artifact.kit import flip, offset_of
from tests.kit.requests import document, publish
from tests.runtime.conftest import Served

NAMES = ("none", "checkpoints:1", "checkpoints:2", "checkpoints:16")
TURBO = SHIPPED["turbo"]
DOCS = (3, 4)  # of the served ones, so that layers are left over: 77 and 257 tokens


def built(served: Served, store: Path, windows: str) -> list[Certificate]:
    documents = [served.documents[number] for number in DOCS]
    return publish(served.checkpoint, store, documents, [TURBO], windows=parse_strategy(windows))


@pytest.fixture(scope="module")
def stores(served: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("windows")
    for name in NAMES:
        built(served, folder / name, name)
    return {name: folder / name for name in NAMES}


def answer(engine: Engine, served: Served, *, first: int = 0, last: int | None = None) -> Result:
    """New text, both documents (of the second one a part), and a question."""
    short, long = (served.documents[number] for number in DOCS)
    return engine.generate(segments=[document(9, 1), short, long[first:last], document(20, 7)], max_new_tokens=8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("first", "last"), [(0, None), (0, 192), (96, 224), (128, None)])
def test_answers_and_what_they_ran(
    served: Served, stores: dict[str, Path], name: str, first: int, last: int | None
) -> None:
    """As ``all``, of which the shared store has every row; the first request pays, the second one does not.

    What the first one saved may be less than nothing: these documents are not much longer than what runs for windows.
    """
    expected = answer(served.engine("turbo"), served, first=first, last=last)
    assert expected.report.counters.window_rows == 0
    engine = Engine(served.checkpoint, stores[name], "turbo")
    cold, hot = (answer(engine, served, first=first, last=last) for _ in range(2))
    assert cold.token_ids == hot.token_ids == expected.token_ids
    ran, usual = cold.report.counters, expected.report.counters
    assert (ran.row_layers - usual.row_layers) == ran.window_row_layers > 0
    assert ran.flops > usual.flops
    assert hot.report.counters == usual
    assert hot.report.ledgers.token_rows == expected.report.ledgers.token_rows
    saved = cold.report.ledgers
    assert saved.token_rows.saved == expected.report.ledgers.token_rows.saved - ran.window_row_layers
    assert saved.head_rows.share <= cold.report.bounds.head_row_ceiling
    assert cold.report.to_dict()["counters"]["window_row_layers"] == ran.window_row_layers
    assert [found.reused for found in hot.report.documents] == [found.reused for found in expected.report.documents]
    text = engine.metrics.exposition()
    assert f'redknot_window_row_layers_total{{arm="reuse"}} {float(ran.window_row_layers)}' in text
    assert engine.check_books() == []


@pytest.mark.parametrize("name", NAMES)
def test_profiles_that_read_all_rows_miss(served: Served, stores: dict[str, Path], name: str) -> None:
    report = answer(Engine(served.checkpoint, stores[name], "rowsparse"), served).report
    assert (report.arm, report.reason) == ("dense", RequestReason.NOTHING_TO_REUSE)
    assert {found.reason for found in report.documents[1:3]} == {DocumentReason.NOT_BUILT}


def test_each_strategy_is_another_artifact(served: Served, tmp_path: Path) -> None:
    """In one store they stand side by side, and the one with the least to compute is used."""
    made = {
        name: built(served, tmp_path / "store", name) for name in ("none", "checkpoints:16", "all", "checkpoints:2")
    }
    assert len({certificate.artifact_id for each in made.values() for certificate in each}) == 8
    report = answer(Engine(served.checkpoint, tmp_path / "store", "turbo"), served).report
    assert [found.artifact_id for found in report.documents[1:3]] == [c.artifact_id for c in made["checkpoints:2"]]


def damage(store: Path, certificate: Certificate, position: int) -> None:
    section = checkpoint_section(position)
    path = generation_dir(store, certificate.artifact_id, 1) / certificate.sections[section].file
    flip(path, offset_of(path, section))


def test_a_damaged_checkpoint_is_refused(served: Served, tmp_path: Path) -> None:
    """Where it is read; another end of the document reads another one."""
    _, long = built(served, tmp_path, "checkpoints:2")
    damage(tmp_path, long, 128)
    engine = Engine(served.checkpoint, tmp_path, "turbo")
    assert answer(engine, served).report.arm == "reuse"
    report = answer(engine, served, last=160).report
    assert (report.arm, report.reason) == ("dense", RequestReason.CORRUPT_SECTION)
    assert "boundary" in report.detail


def test_a_checkpoint_that_is_declared_and_gone_is_refused(served: Served, tmp_path: Path) -> None:
    _, long = built(served, tmp_path, "checkpoints:2")
    (generation_dir(tmp_path, long.artifact_id, 1) / "boundary.safetensors").unlink()
    report = answer(Engine(served.checkpoint, tmp_path, "turbo"), served).report
    assert (report.arm, report.reason) == ("dense", RequestReason.CORRUPT_SECTION)


def test_a_certificate_without_its_checkpoints_is_refused(served: Served, tmp_path: Path) -> None:
    """It binds what it declares: nothing is recomputed in its place."""
    identity = model_identity(served.checkpoint, served.model.geometry, torch.float32, load_settings().cache_dir)
    draft = make_target(served.model.geometry, [TURBO], 1, "default", parse_strategy("checkpoints:2")).draft(identity)
    ids = served.documents[4]
    made = evaluate(served.model, [torch.tensor(ids)], ("latents", "window_none"), Counters())[0]
    with ArtifactStore(tmp_path, create=True) as store:
        store.publish_many([Publication(draft, made, np.array(ids, dtype=np.int32), ("d",))])
    report = answer(Engine(served.checkpoint, tmp_path, "turbo"), served).report
    assert (report.arm, report.reason) == ("dense", RequestReason.MISSING_LAYER)
    assert checkpoint_section(256) in report.detail


def test_states_outlive_the_engine_in_the_disk_tier(
    served: Served, stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDKNOT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(LATENT_DISK_BYTES, "100000000")
    with Engine(served.checkpoint, stores["none"], "turbo") as engine:
        first = answer(engine, served)
    with Engine(served.checkpoint, stores["none"], "turbo") as engine:
        second = answer(engine, served)
    assert (first.report.counters.window_rows > 0, second.report.counters.window_rows) == (True, 0)
    assert first.token_ids == second.token_ids


def test_no_room_to_keep_states(served: Served, stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed each time, and nothing else changes."""
    room = served.engine("turbo")
    expected = answer(room, served)
    held = expected.report.latents
    blocks = held.found + held.filled + 2 * held.copied + held.fresh
    monkeypatch.setenv(LATENT_BYTES, str((blocks + 1) * held.block_bytes))
    engine = Engine(served.checkpoint, stores["none"], "turbo")
    for _ in range(2):
        result = answer(engine, served)
        assert result.token_ids == expected.token_ids
        assert result.report.counters.window_rows > 0
    assert engine.check_books() == []
