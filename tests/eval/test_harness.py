"""Whole runs: what is recorded, what is not done again, what is rejected, and what a run says before it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from eval import workers
from eval.arguments import main
from eval.longbench.__main__ import FIXED, parser, sets
from eval.provenance import checkpoint_identity
from eval.results import Answer, Build, Rejected, Run, Timing, read_results
from tests.kit.arms import FakeEngine, ran_dense
from tests.kit.corpus import ROOT, document
from tests.kit.longbench import write

ARMS = ("recompute", "rowsparse", "turbo", "no-documents")


@dataclass
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three rows of three documents each."""
    folder = tmp_path_factory.mktemp("data")

    def context(*seeds):
        return "".join(f"Passage {number}:\n{document(110, seed)}\n" for number, seed in enumerate(seeds, 1))

    rows = [{"_id": str(n), "context": context(3 * n, 3 * n + 1, 3 * n + 2), "answers": ["green"]} for n in range(3)]
    write(folder / "hotpotqa.jsonl", *rows)
    return folder


@pytest.fixture
def tool(checkpoint, data, tmp_path, capsys):
    """Run LongBench over the small checkpoint."""

    def run(*arguments, out="out"):
        capsys.readouterr()
        common = ["--model", str(checkpoint), "--data-dir", str(data), "--out", str(tmp_path / out)]
        code = main("longbench", parser(), sets, FIXED, [*common, "--datasets", "hotpotqa", *map(str, arguments)])
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture
def fake(checkpoint, monkeypatch):
    """Engines that answer at once, in the order in which they were opened; ``fake.prepare`` alters each."""
    digest = checkpoint_identity(checkpoint).digest

    class Opened(list):
        prepare = staticmethod(lambda engine: None)

    opened = Opened()

    def open_engine(name, model, store, arms, tp):
        opened.append(FakeEngine(arms, digest))
        opened.prepare(opened[-1])
        return opened[-1]

    monkeypatch.setattr(workers, "open_engine", open_engine)
    return opened


def records(tmp_path, kind, out="out"):
    return [one for one in read_results(tmp_path / out / "results.jsonl") if isinstance(one, kind)]


def keys(answers):
    return [(one.dataset, one.item, one.arm) for one in answers]


def test_every_item_goes_through_every_arm_alike(tool, tmp_path):
    ran = tool("--only", "quality", "--limit", 2)
    assert (ran.code, ran.err) == (0, "")
    answers = records(tmp_path, Answer)
    assert keys(answers) == [("hotpotqa", item, arm) for item in "01" for arm in ARMS]
    for item in "01":
        with_documents = [one for one in answers if one.item == item and one.arm != "no-documents"]
        assert len({one.prompt_sha256 for one in with_documents}) == 1
        assert {one.max_new_tokens for one in answers} == {32}
    turbo = next(one for one in answers if one.arm == "turbo")
    assert turbo.report["arm"] == "reuse"
    assert turbo.report["documents"] == {"all": 3, "reused": 3, "new_text": {}}
    assert turbo.kl > 0
    (build,) = records(tmp_path, Build)
    assert (build.documents, build.found) == (6, 0)
    assert str(tmp_path / "out/results.jsonl") in ran.out
    assert "not informative" in ran.out  # this model knows nothing

    assert tool("--only", "quality", "--limit", 1, out="again").code == 0
    kept = ("text", "score", "top1", "prompt_sha256")
    again = records(tmp_path, Answer, "again")
    for one, other in zip(answers[: len(ARMS)], again, strict=True):
        assert [getattr(one, name) for name in kept] == [getattr(other, name) for name in kept]
        # Documents were built in other batches, whose products round otherwise.
        assert other.kl == (one.kl and pytest.approx(one.kl, rel=1e-3))


def test_processes_answer_the_same(tool, tmp_path):
    tool("--only", "quality", "--limit", 2, "--arms", "turbo")
    assert tool("--only", "quality", "--limit", 2, "--arms", "turbo", "--workers", 2, out="two").code == 0
    one, two = (records(tmp_path, Answer, out) for out in ("out", "two"))
    assert sorted(keys(two)) == sorted(keys(one))
    assert {(x.item, x.arm): x.text for x in two} == {(x.item, x.arm): x.text for x in one}


def test_times_come_in_pairs_with_the_artifacts_of_their_own(tool, tmp_path):
    assert tool("--only", "timing", "--arms", "turbo", "--timed-items", 1).code == 0
    timings = records(tmp_path, Timing)
    assert {one.report["arm"] for one in timings if one.arm == "turbo"} == {"reuse"}
    assert sum(one.arm == "turbo" and one.state == "hot" and not one.warmup for one in timings) == 10
    assert all(one.ttft_request_s >= one.ttft_forward_s > 0 for one in timings)
    assert records(tmp_path, Answer) == []
    assert len(records(tmp_path, Build)) == 1


def test_a_run_that_is_repeated_does_nothing(tool, fake, tmp_path):
    first = tool("--arms", "turbo")
    before = (tmp_path / "out/results.jsonl").read_bytes()
    second = tool("--arms", "turbo")
    assert (tmp_path / "out/results.jsonl").read_bytes() == before
    assert second.out == first.out
    assert len(fake) == 1
    assert fake[0].closed


def test_more_items_and_arms_are_added(tool, fake, tmp_path):
    tool("--arms", "rowsparse", "--limit", 1, "--only", "quality")
    tool("--arms", "rowsparse,turbo", "--limit", 2, "--only", "quality")
    answers = records(tmp_path, Answer)
    assert sorted(keys(answers)) == sorted(("hotpotqa", item, arm) for item in "01" for arm in ARMS)
    assert len(records(tmp_path, Run)) == 2
    assert [build.found for build in records(tmp_path, Build)] == [0, 3]


@pytest.mark.parametrize("cut", [0, 30])
def test_an_interrupted_run_goes_on(tool, fake, tmp_path, cut):
    def interrupt(engine):
        def lie(arm, reply):
            if len(engine.asked) == 7:
                raise KeyboardInterrupt
            return reply

        engine.lie = lie

    fake.prepare = interrupt
    ran = tool("--only", "quality")
    assert ran.code == 130
    assert "the same command goes on" in ran.err
    assert fake[0].closed
    path = tmp_path / "out/results.jsonl"
    os.truncate(path, path.stat().st_size - cut)  # the last line may not be whole
    fake.prepare = lambda engine: None
    assert tool("--only", "quality").code == 0
    answers = records(tmp_path, Answer)
    assert sorted(keys(answers)) == sorted(("hotpotqa", item, arm) for item in "012" for arm in ARMS)
    assert len({one.run for one in answers}) == 2


def test_a_killed_run_goes_on(tool, checkpoint, data, tmp_path):
    arguments = ["--model", checkpoint, "--data-dir", data, "--out", tmp_path / "out", "--datasets", "hotpotqa"]
    command = [sys.executable, "-m", "eval.longbench", *map(str, arguments), "--only", "quality", "--arms", "turbo"]
    path = tmp_path / "out/results.jsonl"
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while child.poll() is None and not (path.exists() and b'"answer"' in path.read_bytes()):
            time.sleep(0.02)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert tool("--only", "quality", "--arms", "turbo").code == 0
    arms = ("recompute", "turbo", "no-documents")
    assert sorted(keys(records(tmp_path, Answer))) == sorted(("hotpotqa", item, arm) for item in "012" for arm in arms)


def test_what_does_not_count_is_rejected_with_its_reason(tool, fake, tmp_path):
    fake.prepare = lambda engine: setattr(engine, "lie", lambda arm, r: ran_dense(r) if arm == "turbo" else r)
    ran = tool()
    assert ran.code == 1
    assert "5 results rejected" in ran.err
    found = records(tmp_path, Rejected)
    assert {one.arm for one in found} == {"turbo"}
    assert sorted(one.reason.partition(":")[0] for one in found) == ["ran dense"] * 3 + ["timing"] * 2
    assert "turbo" not in {one.arm for one in records(tmp_path, Answer) + records(tmp_path, Timing)}


def test_other_models_options_and_rows_are_not_mixed_in(tool, fake, data, tmp_path):
    tool("--only", "quality", "--limit", 1)
    ran = tool("--only", "quality", "--max-length", 300)
    assert (ran.code, ran.out) == (2, "")
    assert "option max_length differ; give another --out" in ran.err
    changed = tmp_path / "changed"
    changed.mkdir()
    write(changed / "hotpotqa.jsonl", {"_id": "0", "context": document(80, 9)})
    ran = tool("--only", "quality", "--data-dir", changed)
    assert ran.code == 2
    assert "hotpotqa 0 was another prompt then" in ran.err


def test_a_dry_run_says_what_a_run_does_and_writes_nothing(tool, fake, tmp_path):
    ran = tool("--dry-run", "--json", "--timed-items", 1)
    assert not (tmp_path / "out").exists()
    answers, timing = json.loads(ran.out)["data_sets"]
    assert json.loads(ran.out)["arms"] == list(ARMS)
    assert "hotpotqa" in tool("--dry-run").out
    assert fake == []
    tool("--timed-items", 1)
    assert len(fake[0].asked) == answers["requests"] + timing["requests"]
    found = records(tmp_path, Answer)
    prompts = {one.item: one.prompt_tokens for one in found if one.arm == "recompute"}
    assert (answers["items"], answers["tokens"]) == (3, sum(prompts.values()))
    (build,) = records(tmp_path, Build)
    assert (answers["documents"], answers["document_tokens"]) == (build.documents, build.tokens)
    assert answers["nbytes"] == pytest.approx(build.bytes, rel=0.02)


def test_the_summary_as_json(tool, fake, tmp_path):
    found = json.loads(tool("--json").out)
    assert found["rejected"] == 0
    assert found["results"] == str(tmp_path / "out/results.jsonl")
    turbo = next(one for one in found["arms"] if one["arm"] == "turbo")
    assert turbo["score"] == 1.0
    assert turbo["ttft_ratio"] == pytest.approx(4.0)
    assert turbo["informative"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "turbo,absent"], "arm 'absent' is neither a file nor one of"),
        (["--model", "absent"], "--model absent: no such folder"),
        (["--datasets", "hotpot"], "LongBench has no set 'hotpot'; it has narrativeqa"),
        (["--datasets", "qasper"], "no qasper.jsonl or qasper.jsonl.gz"),
        (["--longbench-e", "--datasets", "narrativeqa"], "LongBench-E has no narrativeqa"),
        (["--engine", "vllm"], "--engine vllm: it must be embedded, sglang"),
        (["--engine", "embedded=x"], "it must be embedded, sglang"),
        (["--engine", "sglang=http://localhost:1", "--workers", "2"], "--workers 2: a server answers"),
        (["--tp", "2", "--only", "quality"], "--tp 2: the embedded engine runs one rank"),
    ],
)
def test_mistakes_are_one_line(tool, arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    ran = tool(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["--pairs", "9"], ["--warmup", "2"], ["--workers", "0"], ["--limit", "x"], ["--arm", "turbo"]]
)
def test_numbers_that_cannot_be_used_are_usage_errors(tool, arguments):
    with pytest.raises(SystemExit) as found:
        tool(*arguments)
    assert found.value.code == 2


def test_an_arm_that_does_not_fit_is_refused_before_anything_is_written(tool, tmp_path):
    (tmp_path / "deep.json").write_text('{"name": "deep", "fence_layers": 2}')
    ran = tool("--arms", tmp_path / "deep.json")
    assert ran.code == 2
    assert "arm deep does not fit the model" in ran.err
    assert not (tmp_path / "out").exists()
