"""``redknot ask``: both arms side by side, and no ratio where nothing was reused."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from redknot.build.documents import CorpusReport, read_corpus, read_text
from redknot.cli import common
from redknot.cli.main import main
from redknot.config import LOG_LEVEL
from redknot.model.tokenizer import load_tokenizer
from tests.kit.requests import LAYERS, ROOT, publish, use_cache, write_checkpoint

TEXTS = {
    "a.txt": "The code of the north gate is seven four one. Nobody may know it but the keeper, who forgets it daily, "
    "and the old fox under the bridge, who cannot read but listens well to everybody.",
    "b.txt": "The south gate has no code at all. It has a rope with a bell and a very loud dog, who sleeps until noon "
    "and bites until midnight, except on holidays, when it is the other way round.",
}
QUESTION = " What is the code of the north gate?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    patch = use_cache(tmp_path_factory.mktemp("cache"))
    made = tmp_path_factory.mktemp("ask")
    checkpoint = write_checkpoint(made / "model")
    tokenizer = load_tokenizer(checkpoint)
    texts = TEXTS | {"long.txt": " ".join(TEXTS.values()) * 4}  # more than the windows at its ends
    for name, text in texts.items():
        (made / name).write_text(text, encoding="utf-8")
    publish(checkpoint, made / "store", [tokenizer.encode(text).tolist() for text in texts.values()])
    yield made
    patch.undo()


def ask(folder: Path, *options: str, store: str = "store", documents: tuple[str, ...] = tuple(TEXTS)) -> int:
    arguments = ["ask", "--model", str(folder / "model"), "--store", str(folder / store), "--question", QUESTION]
    for name in documents:
        arguments += ["--doc", str(folder / name)]
    return main([*arguments, "--max-new-tokens", "3", *options])


def test_json_of_both_arms(folder, capsys):
    assert ask(folder, "--profile", "turbo", "--json") == 0
    out, err = capsys.readouterr()
    body = json.loads(out)
    assert err == ""
    assert body.keys() == {"reuse", "recompute", "ttft_request_ratio"}
    reuse, recompute = body["reuse"], body["recompute"]
    ratio = recompute["ttft_request_s"] / reuse["ttft_request_s"]
    assert body["ttft_request_ratio"] == pytest.approx(ratio)
    for arm, answer in (("reuse", reuse), ("dense", recompute)):
        assert answer["arm"] == arm
        assert isinstance(answer["answer"], str)
        assert answer["ttft_forward_s"] > 0
        assert answer["ledgers"].keys() == {"head_rows", "token_rows", "arithmetic", "wall_clock"}
    assert (reuse["reason"], recompute["reason"]) == (None, "reuse_off")
    assert reuse["prompt_tokens"] == recompute["prompt_tokens"]
    assert len(reuse["documents"]) == 2
    assert all(document["reused"] > 0 and document["reason"] is None for document in reuse["documents"])
    assert reuse["ledgers"]["arithmetic"]["saved"] > 0
    assert recompute["ledgers"]["arithmetic"]["saved"] == 0
    assert reuse["bounds"].keys() == {"row_bound", "head_row_ceiling"}
    assert reuse["bounds"]["row_bound"] > 1
    assert reuse["bounds"]["head_row_ceiling"] == 7 / 8
    assert recompute["bounds"] is None


def test_text_of_both_arms(folder, capsys):
    assert ask(folder, "--profile", "turbo") == 0
    out, _ = capsys.readouterr()
    first = len(load_tokenizer(folder / "model").encode(TEXTS["a.txt"]))
    assert [line.split()[0] for line in out.splitlines()] == [
        *("reuse", "recompute", "AT", "1", str(1 + first)),
        "TTFT",
    ]
    assert "dense:" not in out
    reuse, recompute = out.splitlines()[:2]
    assert re.search(r" \(row bound \d+\.\dx, head-row ceiling 87\.5%\)$", reuse)
    assert "row bound" not in recompute


@pytest.mark.parametrize("arm", ["reuse", "recompute"])
def test_one_arm(folder, capsys, arm):
    assert ask(folder, "--profile", "turbo", "--arm", arm, "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert body.keys() == {arm, "ttft_request_ratio"}
    assert body["ttft_request_ratio"] is None


def test_arms_that_read_no_artifact(folder, capsys):
    """They are compared with recompute too: the second request of a prefix, and every row with fewer experts."""
    for name in ("prefix", "fan-out"):
        assert (
            ask(folder, "--profile", str(ROOT / f"configs/profiles/{name}.json"), "--json", documents=("long.txt",))
            == 0
        )
        body = json.loads(capsys.readouterr().out)
        found = body["reuse"]
        assert (found["arm"], found["profile"]) == ("dense" if name == "prefix" else name, name)
        assert (found["cached_tokens"] > 0, found["reused_tokens"]) == (name == "prefix", 0)
        assert (body["recompute"]["arm"], body["recompute"]["cached_tokens"]) == ("dense", 0)
        assert body["ttft_request_ratio"] > 0
    assert ask(folder, "--profile", str(ROOT / "configs/profiles/prefix.json"), documents=("long.txt",)) == 0
    assert f" tokens reused, {body['reuse']['prompt_tokens'] // 32 * 32} cached" in capsys.readouterr().out


def test_a_fixed_top_three_runs_three_experts_of_every_middle_row(folder, capsys):
    """In the fences all six run; otherwise the profile is ``rowsparse``."""
    counted = {}
    for profile in ("rowsparse", str(ROOT / "configs/profiles/fixed-3.json")):
        assert ask(folder, "--profile", profile, "--arm", "reuse", "--json", documents=("long.txt",)) == 0
        counted[profile] = json.loads(capsys.readouterr().out)["reuse"]
    sparse, fixed = counted.values()
    assert (fixed["arm"], fixed["profile"], fixed["reused_tokens"]) == ("reuse", "fixed-3", sparse["reused_tokens"])
    running = fixed["prompt_tokens"] - fixed["reused_tokens"]
    assert 0 < running < fixed["prompt_tokens"]
    experts, whole = fixed["counters"]["fan_out"], sparse["counters"]["fan_out"]
    assert experts.keys() == {"3", "6"}
    assert experts["3"] == (len(LAYERS) - 2) * running
    assert (whole.keys(), whole["6"]) == ({"6"}, experts["3"] + experts["6"])
    assert fixed["counters"]["expert_pairs"] == 3 * experts["3"] + 6 * experts["6"]


def test_the_log_level_is_that_of_the_environment(folder, capsys, monkeypatch):
    monkeypatch.setenv(LOG_LEVEL, "debug")
    given: list[dict] = []
    monkeypatch.setattr(common.logging, "basicConfig", lambda **options: given.append(options))
    assert ask(folder, "--profile", "turbo", "--arm", "recompute", documents=()) == 0
    assert [options["level"] for options in given] == [logging.DEBUG]


@pytest.mark.parametrize("json_", [True, False])
def test_no_store_is_dense_with_its_reason_and_no_ratio(folder, capsys, json_):
    assert ask(folder, *(["--json"] if json_ else []), store="nowhere") == 0
    out, _ = capsys.readouterr()
    if json_:
        body = json.loads(out)
        assert body["ttft_request_ratio"] is None
        assert (body["reuse"]["arm"], body["reuse"]["reason"]) == ("dense", "store_unavailable")
        assert body["reuse"]["reused_tokens"] == 0
        assert body["reuse"]["answer"] == body["recompute"]["answer"]
    else:
        assert "dense: store_unavailable" in out
        assert "ratio" not in out


def test_what_became_of_each_document(folder, capsys):
    """In part, whole and unknown: tokens found of those that its artifact has, in the table as in the JSON."""
    tokenizer = load_tokenizer(folder / "model")
    (folder / "part.txt").write_text((folder / "long.txt").read_text(encoding="utf-8")[:700], encoding="utf-8")
    (folder / "new.txt").write_text("Nobody has ever read or built this document, which is long enough. " * 3)
    names = ("part.txt", "a.txt", "new.txt")
    assert ask(folder, "--profile", "turbo", "--arm", "reuse", "--json", documents=names) == 0
    documents = json.loads(capsys.readouterr().out)["reuse"]["documents"]
    whole, known = (
        len(tokenizer.encode((folder / name).read_text(encoding="utf-8"))) for name in ("long.txt", "a.txt")
    )
    assert [document["artifact_tokens"] for document in documents] == [whole, known, None]
    assert 0 < documents[0]["matched"] < whole
    assert [document["matched"] for document in documents[1:]] == [known, 0]
    assert ask(folder, "--profile", "turbo", "--arm", "reuse", documents=names) == 0
    header, *lines = capsys.readouterr().out.splitlines()[1:]
    assert header.split() == "AT TOKENS MATCHED REUSED RUN ARTIFACT NEW TEXT BECAUSE".split()
    for line, document in zip(lines, documents, strict=True):
        matched = f"{document['matched']}/{document['artifact_tokens']}" if document["matched"] else "-"
        name = document["artifact_id"][:12] if document["artifact_id"] else "-"
        counts = [document["start"], document["length"], matched, document["reused"], document["recomputed"]]
        assert line.split() == [*map(str, counts), name, *([document["reason"]] if document["reason"] else [])]


def test_a_document_that_is_much_too_long(folder, capsys):
    """20 MB are refused by what their beginning shows, not tokenised first."""
    (folder / "huge.txt").write_text("a few words\n" * 1_700_000)
    started = time.perf_counter()
    assert ask(folder, documents=("a.txt", "huge.txt")) == 2
    assert time.perf_counter() - started < 30  # 80 s and 3 GB if all is encoded
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "redknot ask: error: segment 1 has more than 2048 tokens, the model has 2048 positions\n"


def test_a_document_nobody_built_is_no_speed_up(folder, capsys):
    (folder / "c.txt").write_text("Something else entirely, which was never built, and which is long enough. " * 3)
    assert ask(folder, "--profile", "turbo", documents=("c.txt",)) == 0
    out, _ = capsys.readouterr()
    assert "dense: nothing_to_reuse" in out
    assert "ratio" not in out


def test_another_namespace_has_nothing(folder, capsys):
    assert ask(folder, "--profile", "turbo", "--namespace", "b", "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["reuse"]["arm"], body["ttft_request_ratio"]) == ("dense", None)


@pytest.mark.parametrize(
    ("store", "options", "reason"),
    [("nowhere", (), "store_unavailable"), ("store", ("--namespace", "b"), "nothing_to_reuse")],
)
def test_required_reuse_fails_in_one_line(folder, capsys, store, options, reason):
    assert ask(folder, "--profile", "turbo", "--require-reuse", *options, store=store) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert reason in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("redknot ask: error: reuse is required but not possible")


def test_required_reuse_that_holds(folder, capsys):
    assert ask(folder, "--profile", "turbo", "--require-reuse", "--json") == 0
    assert json.loads(capsys.readouterr().out)["reuse"]["arm"] == "reuse"


def prepare_nothing(path: Path) -> None:
    pass


def prepare_bytes(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00 no text")


def prepare_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [(prepare_nothing, "no such document"), (prepare_bytes, "not readable as UTF-8"), (prepare_folder, "not readable")],
)
def test_a_document_that_cannot_be_read(folder, capsys, prepare, message):
    prepare(folder / f"{prepare.__name__}.txt")
    assert ask(folder, documents=("a.txt", f"{prepare.__name__}.txt")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("redknot ask: error: ")
    assert f"{prepare.__name__}.txt" in err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--profile", "rowsparce"), "profile 'rowsparce' is neither a file nor one of"),
        (("--max-new-tokens", "0"), "max_new_tokens must be a whole number of at least 1, not 0"),
        (("--max-new-tokens", "5000"), "exceed the model's 2048 positions"),
    ],
)
def test_what_cannot_be_asked(folder, capsys, options, message):
    assert ask(folder, *options) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_folder_that_is_no_model(folder, capsys):
    assert main(["ask", "--model", str(folder), "--store", str(folder / "store"), "--question", "?"]) == 2
    assert capsys.readouterr().err.startswith("redknot ask: error: ")


def test_documents_may_be_empty_or_none(folder, capsys):
    (folder / "empty.txt").write_text("")
    assert ask(folder, "--profile", "turbo", "--json", documents=("empty.txt", "a.txt")) == 0
    assert [d["reason"] for d in json.loads(capsys.readouterr().out)["reuse"]["documents"]] == [None]
    assert ask(folder, "--profile", "turbo", "--json", documents=()) == 0
    assert json.loads(capsys.readouterr().out)["reuse"]["reason"] == "nothing_to_reuse"


def test_a_document_is_read_as_the_builder_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert read_text(path) == "one\r\ntwo\r\n"
    assert [document.text for document in read_corpus(path, CorpusReport())] == [read_text(path)]
