"""`redknot profile-heads`: the table it writes, that profiles can use it, and how it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from redknot.model.geometry import load_geometry
from redknot.model.heads import load_heads
from redknot.model.profile import load_profile, misfit
from tests.kit.corpus import MAX_POSITIONS, document, write_corpus

LENGTHS = [100, 40, 90, 60]
PROFILE = {"name": "table", "middle_active": "global+z", "head_table": "heads.json"}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", LENGTHS)


@pytest.fixture
def profile_heads(redknot, corpus, checkpoint):
    def run(*options: object, where: Path = corpus):
        return redknot("profile-heads", where, "--model", checkpoint, "--context", 80, *options)

    return run


def test_the_table_is_written_and_served(profile_heads, redknot, checkpoint, corpus, tmp_path):
    ran = profile_heads("--out", "heads.json")
    assert (ran.code, ran.err) == (0, "")
    found, geometry = load_heads(tmp_path / "heads.json"), load_geometry(checkpoint)
    assert ran.out.startswith("4 of 4 documents measured, 290 rows\n")
    assert f"{found.remaining.fixed:.5f} where 0 of each group is Global" in ran.out
    assert f"{found.remaining.table:.5f} under this table" in ran.out
    assert found.remaining.table <= found.remaining.fixed
    assert (found.corpus.documents, found.corpus.tokens, found.corpus.measured, found.corpus.rows) == (4, 290, 4, 290)
    assert found.table.misfit(geometry) == ""
    assert [name for name in os.listdir(tmp_path) if "tmp" in name] == []
    (tmp_path / "p.json").write_text(json.dumps(PROFILE))
    profile = load_profile(str(tmp_path / "p.json"))
    assert misfit(profile, geometry) == ""
    built = redknot("build", corpus, "--model", checkpoint, "--profile", "p.json", "--json")
    assert built.code == 0
    assert [need for need in built.json["needs"] if need.startswith("zl:")] == [
        need for need in profile.needs() if need.startswith("zl:")
    ]
    question = ("--question", "\nQuestion: What is it?\nAnswer:", "--model", checkpoint)
    asked = redknot("ask", "--doc", corpus / "d0.txt", "--doc", corpus / "d2.txt", "--profile", "p.json", *question)
    assert asked.code == 0, asked.err


def test_json_is_the_file_and_it_is_the_same_every_time(profile_heads, tmp_path):
    first = profile_heads("--json", "--out", "heads.json", "--limit", 2, "--per-group", 3)
    assert first.json == json.loads((tmp_path / "heads.json").read_text())
    assert first.json["corpus"]["measured"] == 2
    assert {len(group) for layer in first.json["table"]["positions"] for group in layer} == {3}
    assert profile_heads("--json", "--limit", 2, "--per-group", 3).json == first.json
    other = profile_heads("--json", "--limit", 2, "--per-group", 3, "--seed", 1).json
    assert other["corpus"]["digest"] == first.json["corpus"]["digest"]


def test_what_cannot_be_read_is_named_and_the_rest_measured(profile_heads, corpus):
    (corpus / "bad.txt").write_bytes(b"\xff")
    (corpus / "long.txt").write_text(document(MAX_POSITIONS + 1))
    ran = profile_heads("--limit", 1)
    assert ran.code == 1
    assert "redknot profile-heads: " in ran.err
    assert "bad.txt: not UTF-8" in ran.err
    assert ran.out.startswith("1 of 4 documents measured")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", 0], "--limit 0: at least one document"),
        (["--context", 0], "--context is at least 1"),
        (["--seed", -1], "--seed at least 0"),
        (["--per-group", 0], "--per-group 0: from 1 to 7"),
        (["--per-group", 8], "--per-group 8: from 1 to 7"),
        (["--out", "."], "give a file in a folder that is there"),
        (["--out", "nowhere/heads.json"], "give a file in a folder that is there"),
        (["--model", "nowhere"], "no config.json"),
    ],
    ids=str,
)
def test_refusals(profile_heads, options, message):
    ran = profile_heads(*options)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert ran.err.count("\n") == 1


def test_one_document_has_no_context(profile_heads, tmp_path):
    alone = write_corpus(tmp_path / "alone", [50])
    ran = profile_heads(where=alone)
    assert ran.code == 2
    assert "holds no two documents that fit one behind the other (1 document;" in ran.err
    # Two that do not fit into the model's positions together are no better.
    long = write_corpus(tmp_path / "long", [MAX_POSITIONS - 10, MAX_POSITIONS - 20])
    assert profile_heads(where=long).code == 2


def test_a_failed_write_leaves_the_table_before(profile_heads, tmp_path, monkeypatch):
    (tmp_path / "heads.json").write_text("before")

    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device", "heads.json")

    monkeypatch.setattr(os, "replace", refuse)
    ran = profile_heads("--out", "heads.json", "--limit", 1)
    assert ran.code == 2
    assert ran.err == "redknot profile-heads: error: heads.json: No space left on device\n"
    assert (tmp_path / "heads.json").read_text() == "before"
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] == []
