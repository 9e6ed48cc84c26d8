"""Several tensor-parallel ranks answer as one does, dense and with reuse; what one cannot use, none does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from redknot.model.profile import SHIPPED
from redknot.runtime.engine import Engine
from tests.e2e.server.conftest import World
from tests.e2e.server.reference import LENGTH, prompts
from tests.kit.requests import BOS, document, publish, use_cache, write_checkpoint
from tests.kit.server import Server, differs, serving

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


def serve_and_compare(folder: Path, checkpoint: Path, world_size: int, requests: Sequence[list[int]]) -> None:
    """The store's sharded sections are used at the size they were built for."""
    publish(checkpoint, folder / "store", [document(130, 1)], [SHIPPED["turbo"]], tp_size=world_size)
    publish(checkpoint, folder / "one", [document(130, 1)], [SHIPPED["turbo"]])
    engine = Engine(checkpoint, folder / "one", "turbo")
    options = ("--tp-size", world_size, "--redknot-profile", "turbo")
    with serving(folder, folder / "store", *options, model=checkpoint) as server:
        for ids in requests:
            for reuse in ("auto", "off"):
                answer = server.generate(ids, 8, {"reuse": reuse})
                alone = engine.generate(token_ids=ids, reuse=reuse, max_new_tokens=8, stop_at_eos=False)
                assert answer.report["arm"] == ("reuse" if reuse == "auto" else "dense")
                assert answer.report["reused_tokens"] == alone.report.reused_tokens
                assert not differs(answer.ids, answer.margins, alone.token_ids)
        server.at_rest()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [4, 8])
def test_many_ranks_answer_as_one_does(tmp_path: Path, world_size: int):
    patch = use_cache(tmp_path / "cache")
    checkpoint = write_checkpoint(tmp_path / "model", o_groups=8, o_lora_rank=16)
    requests = [[BOS, *document(5, seed), *document(130, 1), *document(20, seed)] for seed in range(3)]
    serve_and_compare(tmp_path, checkpoint, world_size, requests)
    patch.undo()
