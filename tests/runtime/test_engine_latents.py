"""The engine's latent store: what requests leave in it, find in it, are refused for, and what it says about that."""

from __future__ import annotations

from pathlib import Path

import pytest

from redknot.config import LATENT_ARENA_BYTES, LATENT_BYTES, LATENT_DISK_BYTES
from redknot.errors import StoreError
from redknot.latents.sizing import slot_bytes
from redknot.latents.space import LatentSpace
from redknot.runtime.engine import Engine
from tests.kit.requests import document
from tests.runtime.conftest import Served


def request_of(served: Served) -> dict[str, object]:
    return {"segments": [document(9, 1), *served.documents[:2], document(20, 7)], "max_new_tokens": 4}


def blocks_of(engine: Engine, served: Served) -> tuple[int, int, int, int]:
    held = engine.generate(**request_of(served)).report.latents
    return held.found, held.filled, held.copied, held.fresh


def test_documents_stay_for_later_requests(served: Served) -> None:
    """96 and 130 tokens are 3 and 5 blocks; turbo refreshes the first of each; 10 and 24 tokens of new text are 2."""
    engine = Engine(served.checkpoint, served.store, "turbo")
    assert blocks_of(engine, served) == (0, 6, 2, 2)
    assert blocks_of(engine, served) == (6, 0, 2, 2)
    assert engine.check_books() == []
    nbytes = engine.latents.store.config.block_bytes
    assert engine.latents.store.books()["device"].live == 8 * nbytes
    text = engine.metrics.exposition()
    for line in (
        "redknot_latents_copies_total 2.0",  # of the second request; the first one filled its own beside the others
        "redknot_latents_hits_total 8.0",
        'redknot_latents_bytes{state="live",tier="device"} ' + str(float(8 * nbytes)),
        'redknot_latents_bytes{state="live",tier="arena"} 0.0',
    ):
        assert line in text, line
    report = engine.generate(**request_of(served)).report.to_dict()["latents"]
    assert report["shared_bytes"] == 6 * nbytes
    assert report["own_bytes"] == 4 * nbytes + report["arena_bytes"]


def test_what_is_in_the_middle_of_others_is_copied(served: Served) -> None:
    """Fences run every row, so that rowsparse refreshes every block."""
    engine = Engine(served.checkpoint, served.store, "rowsparse")
    assert blocks_of(engine, served) == (0, 0, 8, 2)
    assert blocks_of(engine, served) == (0, 0, 8, 2)
    assert engine.latents.store.counters()["hits"] == 8


def test_the_disk_tier_outlives_the_engine(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a file of it that is damaged is set aside; the artifact is read instead, and the answer is the same."""
    expected = served.engine("turbo").generate(**request_of(served))
    monkeypatch.setenv("REDKNOT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(LATENT_DISK_BYTES, "100000000")
    with Engine(served.checkpoint, served.store, "turbo") as engine:
        assert blocks_of(engine, served) == (0, 6, 2, 2)
    files = sorted(tmp_path.rglob("*.block"))
    assert len(files) == 8
    data = bytearray(files[0].read_bytes())
    data[-9] ^= 1
    files[0].write_bytes(data)
    with Engine(served.checkpoint, served.store, "turbo") as engine:
        result = engine.generate(**request_of(served))
        held, counters = result.report.latents, engine.latents.store.counters()
        assert (held.found + held.filled, held.copied) == (6, 2)
        assert (counters["promotions_disk"], counters["disk_quarantined"]) == (7, 1)
        assert result.token_ids == expected.token_ids
        assert engine.check_books() == []
    assert len(list(tmp_path.rglob("quarantine/*"))) == 1


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_a_request_that_is_too_large_is_refused_before_it_runs(
    served: Served, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    nbytes = slot_bytes(LatentSpace(served.model.geometry).layout)
    monkeypatch.setenv(LATENT_BYTES, str(9 * nbytes))
    engine = Engine(served.checkpoint, served.store, "turbo")
    with pytest.raises(StoreError, match=r"the request needs \d+ bytes of latents .* raise REDKNOT_LATENT_BYTES"):
        engine.generate(**request_of(served), reuse=mode) if mode == "auto" else engine.generate(
            token_ids=document(400, 3), reuse=mode, max_new_tokens=4
        )
    books = engine.latents.store.books()
    assert books["arena"].live == 0
    assert engine.check_books() == []
    assert engine.generate(token_ids=document(20, 3), reuse=mode, max_new_tokens=4).token_ids  # smaller ones go on
    monkeypatch.delenv(LATENT_BYTES)
    monkeypatch.setenv(LATENT_ARENA_BYTES, "400000")
    engine = Engine(served.checkpoint, served.store, "turbo")
    with pytest.raises(StoreError, match=r"the request is too long: .*; raise REDKNOT_LATENT_ARENA_BYTES"):
        engine.generate(**request_of(served), reuse=mode)
    assert engine.check_books() == []
