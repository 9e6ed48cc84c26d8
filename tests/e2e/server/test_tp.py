"""Several tensor-parallel ranks answer as one does, dense and with reuse; what one cannot use, none does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from redknot.model.profile import SHIPPED
from redknot.runtime.engine import Engine
from tests.e2e.server.conftest import World
from tests.e2e.server.reference import LENGTH, prompts
from tests.kit.oracle import Oracle
from tests.kit.requests import BOS, document, publish, use_cache
from tests.kit.server import NANO, Server, differs, serving

OFF = {"reuse": "off"}
PROFILES = ("rowsparse", "turbo")


@pytest.fixture(scope="module")
def two(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--tp-size", 2, "--context-length", 4096, "--max-total-tokens", 16384)
    with serving(tmp_path_factory.mktemp("two"), world.store, *options) as server:
        yield server


def test_two_ranks_answer_as_transformers_does(two: Server):
    from tests.e2e.server.test_dense import check

    asked = prompts()
    check(asked, two.together([two.body(ids, LENGTH, OFF) for ids in asked], clients=8))


def test_two_ranks_reuse_as_one_does(two: Server, world: World):
    two.flush()
    names = sorted(world.texts)
    for number in range(3):
        parts = world.documents[names[number]], world.documents[names[number + 5]], world.documents["seam-129"]
        ids = [BOS, *document(7, 1100 + number), *parts[0], *parts[1], *parts[2], *document(25, 1110 + number)]
        for profile in PROFILES:
            alone = world.engine(profile).generate(token_ids=ids, max_new_tokens=8, stop_at_eos=False)
            answer = two.generate(ids, 8, {"profile": profile})
            assert answer.report["arm"] == alone.report.arm
            assert answer.report["reused_tokens"] == alone.report.reused_tokens
            rows = len(ids) - answer.report["cached_tokens"] - answer.report["reused_tokens"]
            assert answer.report["forwarded_rows"] == rows
            assert not differs(answer.ids, answer.margins, alone.token_ids)
        again = two.generate(ids, 8, {"profile": profile})
        assert again.cached == again.report["cached_tokens"] == (len(ids) - 1) // 32 * 32
        assert not differs(again.ids, again.margins, answer.ids)
    two.at_rest()


def test_a_section_that_no_rank_can_read_makes_all_dense(two: Server, world: World):
    from tests.e2e.server.test_documents import published, spoil

    part, artifact = published(world, 1120)
    ids = [BOS, *document(5, 1121), *part, *document(20, 1122)]
    spoil(world, artifact)
    answer = two.generate(ids, 6)
    assert (answer.report["arm"], answer.report["reason"]) == ("dense", "corrupt_section")
    assert world.reference.wrong(ids, answer.ids) == []
    assert two.generate([BOS, *world.documents["document-20"], 9, 10], 4).report["arm"] == "reuse"


def test_a_deleted_document_is_gone_on_all_ranks(two: Server, world: World):
    from tests.e2e.server.test_documents import published

    part, artifact = published(world, 1130)
    ids = [BOS, *document(5, 1131), *part, *document(20, 1132)]
    assert two.generate(ids, 4).report["arm"] == "reuse"
    assert two.call("DELETE", f"/redknot/documents/{artifact}").status_code == 200
    missed = two.generate([*ids, 9], 4)
    assert (missed.report["arm"], missed.report["reason"]) == ("dense", "nothing_to_reuse")


def test_what_was_built_for_one_rank_is_refused_by_name(two: Server, world: World):
    """sglang#10969, #26670: sections that are sharded by rank."""
    part = document(200, 1140)
    publish(world.checkpoint, world.store, [part], [SHIPPED["combined"]])
    ids = [BOS, *document(5, 1141), *part, *document(20, 1142)]
    answer = two.generate(ids, 6, {"profile": "combined"})
    assert (answer.report["arm"], answer.report["reason"]) == ("dense", "geometry_mismatch")
    assert "artifact built for TP size 1, served at TP size 2" in answer.report["detail"]
    assert world.reference.wrong(ids, answer.ids) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [4, 8])
def test_many_ranks_answer_as_one_does(wide: Oracle, tmp_path: Path, ranks: int):
    """Eight output groups, as Flash has; ``combined`` reads what is sharded, from artifacts built for as many."""
    patch = use_cache(tmp_path / "cache")
    checkpoint = tmp_path / "model"
    shutil.copytree(wide.path, checkpoint)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # ids are asked with, but SGLang wants one
        shutil.copy(NANO / name, checkpoint)
    part, question = ([1 + token % 380 for token in document(*one)] for one in ((515, 1), (20, 2)))
    for size in (1, ranks):
        publish(checkpoint, tmp_path / f"store-{size}", [part], [SHIPPED["combined"]], tp_size=size)
    engine = Engine(checkpoint, tmp_path / "store-1", "combined")
    options = ("--tp-size", ranks, "--redknot-profile", "combined", "--context-length", 2048)
    with serving(tmp_path / "server", tmp_path / f"store-{ranks}", *options, model=checkpoint) as server:
        for seed in range(2):
            ids = [1, *(1 + token % 380 for token in document(5, seed)), *part, *question]
            for reuse in ("required", "off"):
                answer = server.generate(ids, 8, {"reuse": reuse})
                alone = engine.generate(token_ids=ids, reuse=reuse, max_new_tokens=8, stop_at_eos=False)
                assert answer.report["arm"] == alone.report.arm
                assert answer.report["reused_tokens"] == alone.report.reused_tokens
                assert not differs(answer.ids, answer.margins, alone.token_ids)
        server.at_rest()
    patch.undo()
