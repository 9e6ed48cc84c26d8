"""ls, show, verify, rm, gc and doctor over a store that `redknot build` made."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from redknot.artifact.store import ArtifactStore
from redknot.cli.common import human_bytes, plural, settings, table
from tests.artifact.kit import TOKEN_DAMAGE, alter_tokens, flip, offset_of
from tests.kit.corpus import write_corpus

LENGTHS = [50, 70, 90]


@pytest.fixture(scope="module")
def made(checkpoint, tmp_path_factory) -> Path:
    """A store of three documents in namespace "default" and one of them in "other"; tests work on copies."""
    from redknot.cli.main import main

    folder = tmp_path_factory.mktemp("made")
    corpus = write_corpus(folder / "corpus", LENGTHS)
    shutil.copy(corpus / "d1.txt", corpus / "twin.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDKNOT_CACHE_DIR", str(folder / "cache"))
        common = ["--model", str(checkpoint), "--store", str(folder / "store"), "--json"]
        assert main(["build", str(corpus), *common]) == 0
        assert main(["build", str(corpus / "d0.txt"), *common, "--namespace", "other"]) == 0
    return folder / "store"


@pytest.fixture
def store(made, redknot, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "redknot-store")
    return tmp_path / "redknot-store"


@pytest.fixture
def ids(store) -> dict[str, str]:
    """First name in namespace "default" -> artifact id."""
    with ArtifactStore(store) as opened:
        return {opened.names(row.artifact_id, "default")[0]: row.artifact_id for row in opened.list("default")}


def damage(store: Path, artifact_id: str) -> None:
    path = store / "objects" / artifact_id[:2] / artifact_id / "g1" / "latents.0-3.safetensors"
    flip(path, offset_of(path, "layers.1.entries"))


def test_names_with_escape_sequences_are_shown_escaped(store, redknot, ids):
    """No build records such a name, but a store may come from anybody."""
    with ArtifactStore(store) as opened:
        opened.add_names(ids["d0.txt"], "default", ["evil\x1b[2J\n.txt"])
    for command in (["ls"], ["show", ids["d0.txt"][:12]], ["verify"], ["rm", ids["d0.txt"][:12]]):
        found = redknot(*command)
        assert found.code == 0
        assert "evil\\x1b[2J\\n.txt" in found.out
        assert found.out.replace("\n", "").isprintable()


def test_a_log_line_is_printable(store, redknot, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # else pytest's own are there, and nothing is set up
    settings()
    logging.getLogger("redknot.test").error("%s", "no \x1b[2J\nstore")
    assert capsys.readouterr().err == "redknot: no \\x1b[2J\\nstore\n"


def test_ls(store, redknot):
    lines = redknot("ls").out.splitlines()
    assert lines[0].split() == "ID NAMESPACE TOKENS SIZE TP GEN STATE CREATED NEEDS NAMES".split()
    assert [line.split()[1:3] for line in lines[1:5]] == [
        ["default", "50"],
        ["default", "70"],
        ["default", "90"],
        ["other", "50"],
    ]
    assert lines[2].endswith("latents,streams:1,window_all,window_tail  d1.txt, twin.txt")
    assert lines[5].startswith("4 artifacts, 260 tokens, ")


def test_ls_of_a_namespace_as_json(store, redknot):
    found = redknot("ls", "--namespace", "other", "--json").json
    assert [(one["names"], one["tokens"], one["state"], one["generation"]) for one in found] == [
        (["d0.txt"], 50, "ready", 1)
    ]
    assert redknot("ls", "--namespace", "none").out == "0 artifacts, 0 tokens, 0 B\n"


def test_show_by_name_and_by_prefix(store, redknot, ids):
    by_name = redknot("show", "d1.txt").out
    assert by_name == redknot("show", ids["d1.txt"][:6]).out == redknot("show", ids["d1.txt"]).out
    assert f"id         {ids['d1.txt']}\nnames      d1.txt, twin.txt\n" in by_name
    assert "layers.2.index_keys" in by_name
    shown = redknot("show", "twin.txt", "--json").json
    assert shown["certificate"]["sections"]["boundary.streams"]["shape"] == [70, 256]
    assert shown["faults"] == []


@pytest.mark.parametrize("verb", ["show", "verify", "rm"])
def test_ambiguous_and_unknown_artifacts(store, redknot, verb):
    """d0.txt is in two namespaces: nothing is guessed, both are listed."""
    ran = redknot(verb, "d0.txt")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "'d0.txt' is ambiguous, give an id: " in ran.err
    assert "(default, 50 tokens" in ran.err
    assert "(other, 50 tokens" in ran.err
    ran = redknot(verb, "d9.txt")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "no artifact has the name or id 'd9.txt'" in ran.err
    assert redknot(verb, "d1.txt", "--namespace", "other").code == 2
    assert redknot(verb, "abc").code == 2  # too short to be a prefix
    assert redknot(verb, "d0.txt", "--namespace", "other").code == 0


@pytest.mark.parametrize("verb", [["ls"], ["show", "x"], ["verify"], ["rm", "x"], ["gc"]])
@pytest.mark.parametrize("where", ["missing", "empty"])
def test_no_store(redknot, tmp_path, verb, where):
    (tmp_path / "empty").mkdir()
    ran = redknot(*verb, "--store", where)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert sorted(os.listdir(tmp_path)) == ["empty"]


def test_verify(store, redknot, ids):
    assert redknot("verify").out.endswith("4 artifacts read, 0 damaged\n")
    damage(store, ids["d1.txt"])
    assert redknot("verify", "d2.txt", ids["d0.txt"][:8]).code == 0
    ran = redknot("verify")
    assert ran.code == 1
    assert ran.out.endswith("4 artifacts read, 1 damaged\n")
    assert "layers.1.entries in latents.0-3.safetensors" in ran.out
    found = redknot("verify", "twin.txt", "--json")
    assert found.code == 1
    assert len(found.json[0]["problems"]) >= 1
    assert "quarantined" in redknot("ls").out
    assert "fault      layers.1.entries" in redknot("show", "d1.txt").out


def test_verify_on_a_disk_that_fails(store, redknot, monkeypatch):
    """A mapped read would end the process with a signal."""

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    ran = redknot("verify", "d2.txt")
    assert (ran.code, ran.out.splitlines()[-1]) == (1, "1 artifact read, 1 damaged")
    assert "EIO" in ran.out


@pytest.mark.parametrize("damage", TOKEN_DAMAGE)
def test_damaged_token_ids(made, store, redknot, ids, checkpoint, damage):
    alter_tokens(store, ids["d1.txt"], TOKEN_DAMAGE[damage])
    ran = redknot("doctor")
    assert (ran.code, ran.out.count("tokens_damaged")) == (1, 1)
    assert ids["d1.txt"] in ran.out
    assert redknot("show", "d1.txt").code == 0
    ran = redknot("verify")
    assert ran.code == 1
    assert ran.out.endswith("4 artifacts read, 1 damaged\n")
    assert f"artifact {ids['d1.txt'][:12]} generation 1: tokens in catalogue.sqlite: " in ran.out
    assert "fault      tokens in catalogue.sqlite: " in redknot("show", "d1.txt").out
    assert "quarantined" in redknot("doctor").out
    built = redknot("build", made.parent / "corpus", "--model", checkpoint, "--json").json
    assert (built["skipped"], built["built"]) == (2, 1)
    assert redknot("verify").code == 0
    assert redknot("rm", "d1.txt", "twin.txt").code == 0


def test_a_build_finds_damaged_token_ids_itself(made, store, redknot, ids, checkpoint):
    alter_tokens(store, ids["d1.txt"], TOKEN_DAMAGE["cut inside an id"])
    built = redknot("build", made.parent / "corpus", "--model", checkpoint, "--json").json
    assert (built["skipped"], built["built"]) == (2, 1)
    assert redknot("doctor").code == 0


def test_rm(store, redknot, ids):
    ran = redknot("rm", "d2.txt", "d0.txt", "--namespace", "default")
    assert ran.code == 0
    assert [line.split(",")[0] for line in ran.out.splitlines()] == [
        f"removed {ids['d2.txt'][:12]} (d2.txt)",
        f"removed {ids['d0.txt'][:12]} (d0.txt)",
    ]
    assert [one["names"] for one in redknot("ls", "--json").json] == [["d1.txt", "twin.txt"], ["d0.txt"]]
    assert not (store / "objects" / ids["d2.txt"][:2] / ids["d2.txt"]).exists()


def test_rm_does_not_take_a_twin_along_by_name(store, redknot, ids):
    ran = redknot("rm", "d2.txt", "twin.txt")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "'twin.txt' has the same content as d1.txt" in ran.err
    assert len(redknot("ls", "--json").json) == 4  # nor anything else
    removed = redknot("rm", ids["d1.txt"][:8], "--json").json
    assert [one["names"] for one in removed] == [["d1.txt", "twin.txt"]]
    assert removed[0]["freed_bytes"] > 1000


def test_rm_of_both_names(store, redknot):
    assert redknot("rm", "d1.txt", "twin.txt").code == 0
    assert len(redknot("ls", "--json").json) == 3


def test_gc(store, redknot, ids):
    (store / "tmp" / "trash-0").mkdir()
    (store / "tmp" / "trash-0" / "file").write_bytes(b"x" * 2000)
    orphan = store / "objects" / "ff" / ("f" * 64) / "g1"
    orphan.mkdir(parents=True)
    assert redknot("gc").out.startswith(
        "removed 1 unfinished, 0 superseded and 0 unlisted directories and 0 quarantined files, 2 kB\nleft "
    )
    found = redknot("gc", "--grace", "0", "--json").json
    assert found["removed"] == {"temporary": 0, "superseded": 0, "orphaned": 1, "quarantined": 0, "bytes": 0}
    assert found["left"]["total"] > found["left"]["objects"] > 0
    damage(store, ids["d1.txt"])
    assert redknot("verify").code == 1
    assert redknot("gc", "--json").json["removed"]["quarantined"] == 0
    removed = redknot("gc", "--grace", "0", "--json").json["removed"]
    assert (removed["quarantined"], removed["bytes"] > 0) == (1, True)
    assert "fault      layers.1.entries" in redknot("show", "d1.txt").out
    assert redknot("gc", "--grace", "-1").code == 2
    assert redknot("gc", "--grace", "nan").code == 2


def test_doctor_of_a_sound_store(store, redknot, checkpoint):
    ran = redknot("doctor", "--model", checkpoint)
    assert ran.code == 0, ran.out
    codes = [line.split()[1] for line in ran.out.splitlines()[:-1]]
    assert [code for code in codes if code != "low_space"] == ["machine", "model", "tokenizer", "store"]
    assert ran.out.endswith("0 errors found\n")


def test_doctor_without_model_or_store(redknot):
    ran = redknot("doctor", "--json")
    assert ran.code == 0
    assert [one["code"] for one in ran.json["findings"]] == ["machine", "no_model", "no_store"]


def test_doctor_finds_what_is_missing(store, redknot, ids):
    os.unlink(store / "objects" / ids["d1.txt"][:2] / ids["d1.txt"] / "g1" / "boundary.safetensors")
    ran = redknot("doctor")
    assert ran.code == 1
    assert "file_missing" in ran.out


def test_doctor_finds_artifacts_of_another_model(store, redknot, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "other")
    config = (tmp_path / "other" / "config.json").read_text()
    (tmp_path / "other" / "config.json").write_text(config.replace('"index_topk": 64', '"index_topk": 32'))
    ran = redknot("doctor", "--model", tmp_path / "other")
    assert ran.code == 0
    assert "3 artifacts of another model, which differs in geometry.index_topk" in ran.out


def test_doctor_notices_altered_weights_when_it_reads_them(redknot, checkpoint, tmp_path):
    """Size, time and inode stay as they were: only reading the file again can tell."""
    model = shutil.copytree(checkpoint, tmp_path / "other")
    write_corpus(tmp_path / "corpus", LENGTHS)
    assert redknot("build", tmp_path / "corpus", "--model", model).code == 0
    ran = redknot("doctor", "--model", model, "--verify-weights")
    assert (ran.code, "ok       weights  " in ran.out) == (0, True)
    flip(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 1)
    ran = redknot("doctor", "--model", model)
    assert (ran.code, "weights" in ran.out) == (0, False)
    ran = redknot("doctor", "--model", model, "--verify-weights")
    assert ran.code == 1
    assert "error    weights_changed" in ran.out
    assert "3 artifacts of another model, which differs in weights_hash" in ran.out


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json"])
def test_doctor_of_a_broken_model(redknot, checkpoint, tmp_path, broken):
    shutil.copytree(checkpoint, tmp_path / "other")
    (tmp_path / "other" / broken).write_bytes(b"{")
    ran = redknot("doctor", "--model", tmp_path / "other")
    assert ran.code == 1
    assert broken in ran.out
    assert ran.out.endswith("1 error found\n")


def test_doctor_of_a_broken_store(redknot, tmp_path):
    (tmp_path / "redknot-store").mkdir()
    (tmp_path / "redknot-store" / "catalogue.sqlite").write_bytes(b"no database" * 100)
    ran = redknot("doctor")
    assert ran.code == 1
    assert "error    store" in ran.out


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (12_345, "12.3 kB"), (999_600, "1 MB"), (10**18, "1e+03 PB")],
)
def test_sizes_read_well(count, text):
    assert human_bytes(count) == text


def test_tables_and_plurals():
    assert table(("A", "BB"), [("x", 1), ("yyy", 22)], right=(1,)) == "A    BB\nx     1\nyyy  22"
    assert [plural(n, "error") for n in (0, 1, 2)] == ["0 errors", "1 error", "2 errors"]
