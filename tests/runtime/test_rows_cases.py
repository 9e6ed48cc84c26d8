"""Documents of every awkward length at every offset class: an answer always, and a report that adds up."""

from __future__ import annotations

from pathlib import Path

import pytest

from redknot.errors import DocumentReason
from redknot.model.profile import SHIPPED
from redknot.runtime.engine import Engine
from tests.kit.requests import BLOCK, REUSING, WINDOW, document, publish
from tests.runtime.conftest import Served

LENGTHS = (1, 3, 4, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
OFFSETS = (0, 1, 3, 4, 31, 32, 33, 127)
DOCS = {length: document(length, 300 + length) for length in LENGTHS}


@pytest.fixture(scope="module")
def store(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lengths") / "store"
    publish(served.checkpoint, made, list(DOCS.values()))
    return made


@pytest.fixture(scope="module", params=REUSING)
def engine(request: pytest.FixtureRequest, served: Served, store: Path) -> Engine:
    return Engine(served.checkpoint, store, request.param)


def expected_reason(profile: str, length: int, offset: int) -> DocumentReason | None:
    if length < BLOCK:
        return DocumentReason.TOO_SHORT
    protected = SHIPPED[profile].protected
    last = length - protected.last_windows * WINDOW
    covered = protected.first_windows * WINDOW >= (last // 4 * 4 if protected.last_windows else length)
    return DocumentReason.NOT_WORTH_IT if offset > 0 and covered else None


@pytest.mark.parametrize("offset", OFFSETS)
def test_every_length_at_every_offset(engine, offset):
    """Ids as they are (no BOS), so that offset 0 is an exact prefix; spans tell each document's edges."""
    ids, spans = document(offset, 1) if offset else [], []
    for number, length in enumerate(sorted(LENGTHS, key=lambda length: (length * 7 + offset) % 11)):
        spans.append((len(ids), len(ids) + length))
        ids = ids + DOCS[length] + document(number % 3, 2)
    result = engine.generate(token_ids=[*ids, *document(9, 4)], spans=spans, max_new_tokens=2)
    report = result.report
    assert report.arm == "reuse"
    assert result.token_ids
    assert [(found.start, found.start + found.length) for found in report.documents] == spans
    for found in report.documents:
        assert found.reason is expected_reason(engine.profile.name, found.length, found.start), found
        assert found.reused + found.recomputed == found.length
        if found.reason is not None:
            assert found.reused == 0
        elif engine.profile.name == "turbo":
            assert found.reused == found.length - (WINDOW if found.start else 0)
        else:
            assert 0 < found.reused <= found.length - (2 * WINDOW if found.start else 0)
    assert report.reused_tokens == sum(found.reused for found in report.documents)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 65, 129])
def test_each_length_alone_behind_any_offset(engine, length):
    for offset in (0, 1, 33):
        ids = document(offset, 1) if offset else []
        for question in ([], document(3, 4)):
            result = engine.generate(token_ids=[*ids, *DOCS[length], *question], max_new_tokens=1)
            if result.report.arm == "reuse":
                assert 0 < result.report.reused_tokens < len(ids) + length + len(question)
            else:
                off = engine.generate(token_ids=[*ids, *DOCS[length], *question], reuse="off", max_new_tokens=1)
                assert result.token_ids == off.token_ids
                assert result.report.reused_tokens == 0


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 31, 32, 33, 127, 128, 129])
def test_short_prompts(served, length):
    engine = served.engine()
    result = engine.generate(token_ids=document(length, 6), max_new_tokens=2)
    off = engine.generate(token_ids=document(length, 6), reuse="off", max_new_tokens=2)
    assert result.token_ids == off.token_ids
