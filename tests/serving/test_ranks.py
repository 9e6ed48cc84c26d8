"""The serving engine on tensor-parallel ranks: the same answers, and all dense when one of them cannot read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from redknot.artifact.store import ArtifactStore
from redknot.model.profile import SHIPPED
from tests.kit.oracle import Oracle
from tests.kit.ranks import run_ranks
from tests.kit.requests import BOS, ROOT, document, publish
from tests.serving.conftest import World


def prompts(world: World) -> list[tuple[list[int], str]]:
    first = [BOS, *document(5, 3), *world.documents[0], *world.documents[3], *document(17, 4)]
    second = [BOS, *world.documents[1], *document(40, 6)]
    return [(first, "auto"), (second, "auto"), (first, "off")]


@pytest.fixture(scope="module")
def flash_like(wide: Oracle, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A random checkpoint of eight output groups, as Flash has, and stores of two documents for 1, 4 and 8 ranks."""
    folder = tmp_path_factory.mktemp("flash-like")
    checkpoint = folder / "model"
    shutil.copytree(wide.path, checkpoint)
    shutil.copy(ROOT / "models/nano/tokenizer.json", checkpoint)  # its hash is asked for, nothing is tokenised
    documents = [[1 + token % 380 for token in document(length, seed)] for seed, length in enumerate((300, 515))]
    for size in (1, 4, 8):
        publish(checkpoint, folder / f"store-{size}", documents, [SHIPPED["combined"], SHIPPED["turbo"]], tp_size=size)
    return World(checkpoint, folder / "store-1", documents, {})


@pytest.mark.parametrize("profile", ["combined", "turbo"])
@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_of_eight_groups_answer_as_one_does(flash_like, tmp_path, ranks, profile):
    """``combined`` reads what is sharded by rank, from artifacts that were built for as many."""
    question = [1 + token % 380 for token in document(20, 9)]
    ids = [*flash_like.documents[0], *flash_like.documents[1], *question]
    jobs = {"requests": [(ids, "required"), (ids, "off")], "chunk": 256, "context": 2048}
    [alone] = run(flash_like, tmp_path / "one", 1, profile, **jobs)
    store = str(flash_like.store.with_name(f"store-{ranks}"))
    for rank in run(flash_like, tmp_path / "many", ranks, profile, stores=[store] * ranks, **jobs):
        same(rank, alone)
        assert rank[0]["reused"] == alone[0]["reused"] > 0


def test_what_was_built_for_one_rank_is_refused_by_name_at_four(flash_like, tmp_path):
    ids = [*flash_like.documents[0], *flash_like.documents[1], 7, 8, 9]
    jobs = {"requests": [(ids, "auto")], "chunk": 256, "context": 2048}
    for rank in run(flash_like, tmp_path, 4, "combined", **jobs):
        assert rank[0]["arm"] == "dense"
        assert rank[0]["reason"] == "geometry_mismatch"
        assert "artifact built for TP size 1, served at TP size 4" in rank[0]["detail"]


def run(world: World, folder: Path, ranks: int, profile: str = "rowsparse", **jobs: Any) -> list[list[dict[str, Any]]]:
    folder.mkdir(exist_ok=True)
    stores = [str(world.store)] * ranks
    content = {"checkpoint": str(world.checkpoint), "stores": stores, "profile": profile, "chunk": 64, "length": 6}
    jobs["requests"] = jobs.get("requests") or prompts(world)
    (folder / "jobs.json").write_text(json.dumps(content | jobs))
    return run_ranks(ranks, "tests.serving.rank_jobs:serve", folder)


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Equal answers, up to the first token that two others are equally likely to be."""
    for one, other in zip(found, wanted, strict=True):
        assert one["failure"] == other["failure"] == "None"
        for token, expected, margin in zip(one["answer"], other["answer"], one["margins"], strict=True):
            if token != expected:
                assert margin < 1e-3
                break


def test_two_ranks_answer_as_one_does(world, tmp_path):
    [alone] = run(world, tmp_path / "one", 1)
    ranks = run(world, tmp_path / "two", 2)
    for rank in ranks:
        same(rank, alone)
        assert [one["key"] for one in rank] == [one["key"] for one in alone]
        assert [one["reused"] for one in rank] == [one["reused"] for one in alone]
        assert rank[0]["reused"] > 0
        assert rank[3]["cached"] > 0
        assert all(one["wrong"] == [] for one in rank)


@pytest.mark.parametrize("fault", ["missing", "corrupt", "empty", "slow"])
def test_one_rank_that_cannot_read_makes_all_dense(world, tmp_path, fault):
    broken = tmp_path / "broken"
    shutil.copytree(world.store, broken)
    if fault == "missing":
        for path in broken.rglob("latents.*.safetensors"):
            path.unlink()
    elif fault == "corrupt":
        for path in broken.rglob("latents.*.safetensors"):
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
    elif fault == "empty":
        with ArtifactStore(broken) as store:
            for row in store.list():
                store.remove(row.artifact_id, row.namespace)
    stores = [str(world.store), str(world.store if fault == "slow" else broken)]
    found = run(world, tmp_path / "ranks", 2, stores=stores, slow=1 if fault == "slow" else None)
    dense = run(world, tmp_path / "dense", 1, requests=[(ids, "off") for ids, _ in prompts(world)])[0]
    for number, rank in enumerate(found):
        same(rank, dense)
        assert {one["arm"] for one in rank} == {"dense"}
        assert rank[2]["reason"] == "reuse_off"
        assert rank[0]["seconds"] < 30
        own = {"missing": "corrupt_section", "corrupt": "corrupt_section", "slow": "section_late"}
        wanted = {"rank_disagreement"} if number == 0 else {own.get(fault, "nothing_to_reuse"), "rank_disagreement"}
        assert {rank[0]["reason"], rank[1]["reason"]} <= wanted
    assert [one["key"] for one in found[0]] == [one["key"] for one in found[1]]
