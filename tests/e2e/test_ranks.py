"""Two real ranks: both reuse, or both run dense with a reason each; nothing hangs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from redknot.artifact.needs import parse_strategy
from redknot.artifact.schema import generation_dir
from redknot.artifact.store import ArtifactStore
from redknot.model.profile import SHIPPED
from redknot.runtime.engine import Engine
from tests.artifact.kit import flip, offset_of
from tests.kit.ranks import run_ranks
from tests.kit.requests import ROOT, document, publish, use_cache, write_checkpoint

LIMIT = 120  # seconds until the ranks are killed and the test fails
DOCS = [document(length, number) for number, length in enumerate((96, 130))]
QUESTION = document(20, 7)
DEVIATION = ROOT / "configs/profiles/deviation.json"
BOTH, SECOND = [*DOCS, QUESTION], [DOCS[1], QUESTION]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    patch = use_cache(tmp_path_factory.mktemp("cache"))
    yield tmp_path_factory.mktemp("ranks")
    patch.undo()


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Any]:
    """All scenarios, in one pair of processes; and what one process says to the same requests."""
    checkpoint = write_checkpoint(folder / "model")
    whole = folder / "whole"
    publish(checkpoint, whole, DOCS, tp_size=2)

    def copy(name: str) -> Path:
        shutil.copytree(whole, folder / name)
        return folder / name

    shared, other = copy("shared"), copy("other")
    certificate = publish(checkpoint, copy("none"), DOCS, tp_size=2)[0]
    section = "layers.2.zl.r1of2"
    path = generation_dir(shared, certificate.artifact_id, 1) / certificate.sections[section].file
    flip(path, offset_of(path, section))
    latents = generation_dir(other, certificate.artifact_id, 1) / certificate.sections["layers.2.entries"].file
    flip(latents, offset_of(latents, "layers.2.entries"))
    fewer = copy("fewer")
    with ArtifactStore(fewer) as opened:
        opened.remove(certificate.artifact_id, "default")
    apart, one = folder / "apart", folder / "one"
    publish(checkpoint, apart, DOCS, tp_size=2)
    publish(checkpoint, one, DOCS)
    bare = folder / "bare"
    publish(checkpoint, bare, DOCS, [SHIPPED["turbo"]], windows=parse_strategy("none"))
    shallow = folder / "deviation.json"  # all rows up to layer 4 of 5 would cost more than skipped rows save
    shallow.write_text(json.dumps(json.loads(DEVIATION.read_text()) | {"deviation_layer": 2}))

    scenarios: dict[str, dict[str, Any]] = {
        "fine": {"profile": "combined", "stores": [whole, whole], "requests": [BOTH, SECOND]},
        "slow": {"profile": "turbo", "stores": [whole, whole], "requests": [BOTH], "slow": 1},
        # Rank 0 has read its shards before rank 1 finds its own damaged and puts the artifact in quarantine.
        "corrupt shard": {"profile": "combined", "stores": [shared, shared], "requests": [BOTH, SECOND], "slow": 1},
        "corrupt copy": {"profile": "rowsparse", "stores": [whole, other], "requests": [BOTH, SECOND]},
        "no store": {"profile": "rowsparse", "stores": [folder / "nowhere", whole], "requests": [BOTH]},
        "other plan": {"profile": "rowsparse", "stores": [whole, fewer], "requests": [BOTH, SECOND]},
        "built apart": {"profile": "rowsparse", "stores": [whole, apart], "requests": [BOTH]},
        "built for one": {"profile": "combined", "stores": [one, one], "requests": [BOTH]},
        "not sharded": {"profile": "rowsparse", "stores": [one, one], "requests": [BOTH]},
        # Both compute the windows that are not on disk, then both find them.
        "windows": {"profile": "turbo", "stores": [bare, bare], "requests": [BOTH, SECOND]},
        "deviation": {"profile": str(shallow), "stores": [one, one], "requests": [BOTH]},
    }
    jobs = {"checkpoint": str(checkpoint), "scenarios": list(scenarios.values())}
    (folder / "jobs.json").write_text(json.dumps(jobs, default=str))
    ranks = run_ranks(2, "tests.e2e.rank_jobs:serve", folder, limit=LIMIT)
    found = {name: [rank[number] for rank in ranks] for number, name in enumerate(scenarios)}
    server = Engine(checkpoint)
    found["dense"] = [
        list(server.generate(segments=segments, reuse="off", max_new_tokens=4).token_ids) for segments in (BOTH, SECOND)
    ]
    for profile in ("combined", "rowsparse", "turbo", str(shallow)):
        single = Engine(checkpoint, one, profile)
        found[Path(profile).name] = [
            list(single.generate(segments=s, max_new_tokens=4).token_ids) for s in (BOTH, SECOND)
        ]
    return found


def reasons(scenario: list[list[dict[str, Any]]], request: int = 0) -> list[str]:
    return [rank[request]["reason"] for rank in scenario]


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("fine", "combined"),
        ("slow", "turbo"),
        ("not sharded", "rowsparse"),
        ("windows", "turbo"),
        ("deviation", "deviation.json"),
    ],
    ids=["fine", "slow", "not sharded", "windows", "deviation"],
)
def test_two_ranks_reuse_as_one_process_does(answers, name, profile):
    for rank in answers[name]:
        for number, (answer, expected) in enumerate(zip(rank, answers[profile], strict=False)):
            assert (answer["arm"], answer["reason"]) == ("reuse", "None")
            assert answer["tokens"] == expected
            assert all(answer["reused"])
            first = name == "windows" and number == 0
            assert answer["windows"] > 0 if first else answer["windows"] == 0
            assert answer["flops"] < 1 if first else 0 < answer["flops"] < 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("corrupt shard", ["rank_disagreement", "corrupt_section"]),
        ("corrupt copy", ["rank_disagreement", "corrupt_section"]),
        ("no store", ["store_unavailable", "rank_disagreement"]),
        ("other plan", ["rank_disagreement", "rank_disagreement"]),
        ("built apart", ["rank_disagreement", "rank_disagreement"]),
        ("built for one", ["geometry_mismatch", "geometry_mismatch"]),
    ],
)
def test_all_ranks_run_dense_when_one_cannot_reuse(answers, name, expected):
    assert reasons(answers[name]) == expected
    for rank in answers[name]:
        assert rank[0]["arm"] == "dense"
        assert not any(rank[0]["reused"])
        assert rank[0]["tokens"] == answers["dense"][0]


@pytest.mark.parametrize("name", ["corrupt shard", "corrupt copy", "other plan"])
def test_the_next_request_is_not_affected(answers, name):
    """Of a document that all ranks can read, reuse goes on."""
    assert reasons(answers[name], 1) == ["None", "None"]
    assert [rank[1]["arm"] for rank in answers[name]] == ["reuse", "reuse"]
    assert answers[name][0][1]["tokens"] == answers[name][1][1]["tokens"]
