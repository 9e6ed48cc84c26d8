"""`redknot build` as people use it: real corpora, a real (small) model, everything that may go wrong."""

from __future__ import annotations

import os
import shutil
import signal
from collections import namedtuple
from pathlib import Path

import pytest

from redknot.artifact.store import ArtifactStore
from redknot.build import builder
from redknot.cli.common import DEFAULT_STORE
from tests.artifact.kit import flip
from tests.kit.corpus import MAX_POSITIONS, document, write_corpus, write_lines

LENGTHS = [150, 40, 90, 200, 40, 60]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", LENGTHS)


@pytest.fixture
def build(redknot, corpus, checkpoint):
    """`redknot build corpus` with options; --json unless told otherwise."""

    def run(*options: object, json: bool = True, where: Path = corpus):
        return redknot("build", where, "--model", checkpoint, *(["--json"] if json else []), *options)

    return run


def object_bytes(path: str = "redknot-store") -> int:
    with ArtifactStore(path) as store:
        return store.bytes_on_disk().objects


def temporary() -> list[str]:
    return os.listdir("redknot-store/tmp")


def test_build_then_build_again(build, redknot):
    first = build()
    assert (first.code, first.err) == (0, "")
    report = first.json
    assert (report["documents"], report["built"], report["skipped"]) == (6, 6, 0)
    assert report["tokens"] == report["built_tokens"] == sum(LENGTHS)
    assert report["needs"] == ["latents", "streams:1", "window_all", "window_tail"]
    assert {name for one in report["artifacts"] for name in one["names"]} == {f"d{n}.txt" for n in range(6)}
    again = build().json
    assert (again["built"], again["skipped"], again["tokens_per_second"]) == (0, 6, 0)
    assert {one["did"] for one in again["artifacts"]} == {"skipped"}
    assert temporary() == []
    assert redknot("verify").code == 0


def test_altered_weights_are_noticed_when_they_are_read_again(redknot, corpus, checkpoint, tmp_path):
    """Size, time and inode of the file stay as they were."""
    model = shutil.copytree(checkpoint, tmp_path / "other")

    def build(*options: str):
        return redknot("build", corpus, "--model", model, "--json", *options).json

    assert build()["built"] == 6
    flip(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 1)
    assert (build()["built"], build("--dry-run", "--verify-weights")["to_build"]) == (0, 6)
    assert build("--verify-weights")["built"] == 6


def test_text_output(build):
    ran = build(json=False)
    assert ran.code == 0
    assert ran.err == ""  # no progress bar where nobody watches
    assert "6 documents, 580 tokens\nbuilt 6/6, 580 tokens, " in ran.out
    assert "skipped 6/6 (resumed): there and valid\nbuilt 0/6, 0 tokens" in build(json=False).out


@pytest.mark.parametrize("profiles", [["rowsparse"], ["turbo"], ["headsplit"], ["combined", "turbo"]])
def test_dry_run_is_right_and_writes_nothing(build, tmp_path, profiles):
    chosen = [word for name in profiles for word in ("--profile", name)]
    before = sorted(os.listdir(tmp_path))
    dry = build("--dry-run", *chosen)
    assert sorted(os.listdir(tmp_path)) == before
    assert (dry.code, dry.json["to_build"], dry.json["tokens_to_build"]) == (0, 6, 580)
    assert dry.json["free_bytes"] == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    built = build(*chosen).json
    assert built["built_bytes"] == object_bytes()
    assert built["built_bytes_per_token"] == built["built_bytes"] / built["built_tokens"]
    assert built["built_bytes_per_token"] == pytest.approx(built["bytes_per_token"], rel=0.001)
    assert object_bytes() == pytest.approx(dry.json["planned_bytes"], rel=0.001)


def test_dry_run_says_what_is_there(build, corpus):
    shutil.move(corpus / "d3.txt", "d3.txt")
    build()
    shutil.move("d3.txt", corpus / "d3.txt")
    dry = build("--dry-run", json=False)
    assert "skipped     5/6 already in redknot-store\nto build    1/6, 200 tokens\n" in dry.out
    assert dry.out.endswith("dry run: nothing was written\n")
    assert build("--dry-run").json["skipped"] == 5


def test_not_enough_space(build, monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 999_000, 1000))
    planned = build("--dry-run").json["planned_bytes"]
    ran = build(json=False)
    assert ran.code == 2
    assert f"{planned} bytes are needed, 1000 are free" in ran.err
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "redknot-store").exists()
    assert "NOT ENOUGH" in build("--dry-run", json=False).out


def test_identical_documents_are_stored_once(build, redknot, corpus):
    shutil.copy(corpus / "d0.txt", corpus / "same.txt")
    write_lines(corpus / "more.jsonl.gz", [{"id": "third", "text": (corpus / "d0.txt").read_text(), "url": "x"}])
    report = build().json
    assert (report["documents"], report["identical"], report["built"]) == (8, 2, 6)
    names = [one["names"] for one in redknot("ls", "--json").json]
    assert ["d0.txt", "same.txt", "third"] in names


def test_a_new_name_for_a_known_document(build, redknot, corpus):
    build()
    os.rename(corpus / "d0.txt", corpus / "renamed.txt")
    assert build().json["built"] == 0
    assert redknot("show", "renamed.txt", "--json").json["names"] == ["d0.txt", "renamed.txt"]


def test_a_changed_document_takes_the_name(build, redknot, corpus):
    build()
    (corpus / "d0.txt").write_text(document(77, 99))
    report = build().json
    assert (report["built"], report["skipped"]) == (1, 5)
    assert redknot("show", "d0.txt", "--json").json["tokens"] == 77


def test_bad_documents_spare_the_others(build, corpus):
    (corpus / "long.txt").write_text(document(MAX_POSITIONS + 1, 7))
    (corpus / "bytes.txt").write_bytes(b"abc\xff")
    (corpus / "esc\x1b[2J.txt").write_bytes(b"\xff")
    write_lines(corpus / "l.jsonl", ["{", {"id": "x"}, {"text": "t"}, {"id": "d0.txt", "text": "t"}])
    (corpus / "empty.txt").write_text(" \n")
    (corpus / "image.png").write_bytes(b"png")
    ran = build(json=False)
    assert ran.code == 1
    lines = [line.removeprefix(f"redknot build: {corpus}/") for line in ran.err.splitlines()]
    assert lines[0] == "bytes.txt: not UTF-8 at byte 3"
    assert lines[1] == r"esc\x1b[2J.txt: not UTF-8 at byte 0"
    assert lines[2].startswith("l.jsonl:1: not JSON (")
    assert lines[3:] == [
        'l.jsonl:2: "text" is missing or not a string',
        'l.jsonl:3: "id" is missing or neither a string nor an integer',
        f"l.jsonl:4: the name 'd0.txt' is taken by {corpus}/d0.txt",
        f"long.txt: {MAX_POSITIONS + 1} tokens, the model has {MAX_POSITIONS} positions",
        "redknot build: left out 1 empty document, 1 file of other types",
    ]
    assert "built 6/6" in ran.out
    report = build().json
    assert (len(report["problems"]), report["empty"], report["ignored_files"]) == (7, 1, 1)


def test_control_tokens_in_documents_are_text(build, corpus, checkpoint):
    from redknot.model.tokenizer import load_tokenizer

    text = "before <|bos|> and <|eos|> after"
    (corpus / "d0.txt").write_text(text)
    assert build().code == 0
    with ArtifactStore("redknot-store") as store:
        row = store.catalogue.rows("default", name="d0.txt")[0]
        ids = next(t.token_ids for t in store.tokens("default", store.identities("default")[0]) if t.artifact == row)
    assert not set(ids.tolist()) & {0, 1, 2}
    assert load_tokenizer(checkpoint).decode(ids) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--profile", "nonsense"], "neither a file nor one of recompute"),
        (["--profile", "recompute"], "nothing to build: recompute reuses nothing"),
        (["--tp-size", "3", "--profile", "headsplit"], "3 tensor parallel ranks do not divide 2 output groups"),
        (["--tp-size", "0"], "TP size 0"),
        (["--namespace", ""], "no namespace"),
        (["--model", "nowhere"], "nowhere: no config.json"),
        (["--store", "corpus"], "corpus is not an artifact store and not empty"),
    ],
)
def test_refusals_are_one_line(build, tmp_path, options, message):
    before = sorted(os.listdir(tmp_path))
    ran = build(*options)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert sorted(set(os.listdir(tmp_path)) - {"cache"}) == before


def test_a_profile_that_cannot_be_is_one_line(build, tmp_path):
    profile = tmp_path / "late.json"
    profile.write_text('{"name": "late", "middle_idle": "full", "selector": "none", "fence_idle": "skip"}')
    ran = build("--profile", profile)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert f"profile {profile}: fence_idle skip needs middle_idle skip" in ran.err


@pytest.mark.parametrize(("make", "message"), [("folder", "holds no document"), (None, "there is no folder or file")])
def test_nothing_to_read(build, tmp_path, make, message):
    where = tmp_path / "other"
    if make:
        where.mkdir()
        (where / "x.png").write_text("x")
    ran = build(where=where)
    assert ran.code == 2
    assert message in ran.err


def test_a_model_must_be_given_where_there_is_no_default(redknot, corpus):
    ran = redknot("build", corpus)
    assert ran.code == 2
    assert "give --model" in ran.err


def test_the_default_model_is_nano(redknot, corpus, checkpoint, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "nano").symlink_to(checkpoint)
    assert redknot("build", corpus, "--dry-run").code == 0


def test_no_tokenizer(redknot, corpus, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    ran = redknot("build", corpus, "--model", tmp_path / "bare")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "no tokenizer.json" in ran.err


def test_another_checkpoint_is_another_model(build, redknot, corpus, checkpoint, tmp_path):
    build()
    shutil.copytree(checkpoint, tmp_path / "other")
    with open(tmp_path / "other" / "model.safetensors", "r+b") as handle:
        handle.seek(-2, os.SEEK_END)
        handle.write(b"\x01")
    report = redknot("build", corpus, "--model", tmp_path / "other", "--json").json
    assert (report["built"], report["skipped"]) == (6, 0)


def test_ranks_are_sharded(build, redknot):
    report = build("--profile", "combined", "--profile", "turbo", "--tp-size", "2").json
    assert report["tp_size"] == 2
    sections = redknot("show", "d3.txt", "--json").json["certificate"]["sections"]
    shards = {name: record["shape"] for name, record in sections.items() if ".zl." in name}
    assert shards == {f"layers.{layer}.zl.r{rank}of2": [200, 64] for layer in (1, 2) for rank in (0, 1)}
    assert build("--profile", "rowsparse").json["skipped"] == 6  # what is there holds all that this needs
    assert build("--profile", "combined").json["built"] == 6  # but other ranks want other shards


def test_namespaces_share_nothing(build):
    assert build("--namespace", "a").json["built"] == 6
    assert build("--namespace", "b").json["built"] == 6


def test_an_interrupted_build_goes_on(build, monkeypatch):
    native, calls = builder.evaluate_batch, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return native(*args)

    monkeypatch.setattr(builder, "BATCH_TOKENS", 80)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    monkeypatch.setattr(builder, "evaluate_batch", interrupted)
    ran = build(json=False)
    assert (ran.code, ran.out) == (130, "")
    assert "stopped at 4/6; the same command goes on from there" in ran.err
    assert temporary() == []
    assert "skipped 4/6 (resumed): there and valid\nbuilt 2/6, " in build(json=False).out


def test_an_empty_catalogue_is_gone_on_from(redknot, corpus, checkpoint, tmp_path):
    """What a build leaves that was killed at its first step."""
    store = tmp_path / DEFAULT_STORE
    store.mkdir()
    (store / "catalogue.sqlite").write_bytes(b"")
    assert redknot("build", corpus, "--model", checkpoint).code == 0
    assert redknot("verify").code == 0


@pytest.mark.parametrize("windows", ["none", "checkpoints:2"])
def test_windows_are_said_and_planned(build, redknot, windows):
    options = ("--profile", "turbo", "--windows", windows)
    planned = build("--dry-run", *options).json
    assert (planned["windows"], planned["needs"]) == (windows, ["latents", f"window_{windows}"])
    text = build("--dry-run", *options, json=False).out
    assert windows in next(line for line in text.splitlines() if line.startswith("windows "))
    built = build(*options).json
    assert (built["windows"], built["built"]) == (windows, 6)
    assert built["built_bytes"] == pytest.approx(planned["planned_bytes"], rel=1e-3)
    assert build(*options).json["skipped"] == 6
    assert f"windows    {windows}\n" in redknot("show", "d1.txt").out
    assert redknot("show", "d1.txt", "--json").json["windows"] == windows
    assert redknot("verify").code == 0
    # Another strategy is another artifact.
    assert build("--profile", "turbo").json["built"] == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--windows", "none"), "windows none: a profile that runs rows inside documents reads all window rows"),
        (("--profile", "turbo", "--windows", "checkpoints"), "windows 'checkpoints': it must be all, none or"),
        (("--profile", "turbo", "--windows", "checkpoints:0"), "windows 'checkpoints:0': it must be all, none or"),
    ],
)
def test_windows_that_cannot_be(build, options, message):
    failed = build(*options, json=False)
    assert failed.code != 0
    assert message in failed.err
    assert failed.err.count("\n") == 1
