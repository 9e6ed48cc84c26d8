"""The evaluation against real servers: rounds of load over one that it starts, answers over one that runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eval.results import Answer, Load, Run, read_results
from tests.e2e.server.conftest import World
from tests.kit.child import run
from tests.kit.server import Server

ARMS = ("--model", "nano", "--arms", "turbo,plain,prefix")


@pytest.mark.timeout(420)
def test_load_on_a_server_of_its_own(tmp_path: Path):
    """Profiles that are files reach the server, and the same command goes on where it ended."""
    words = ("--documents", 4, "--document-tokens", 160, "--prompt-documents", 2, "--requests", 3, "--new-tokens", 3)
    command = (sys.executable, "-m", "eval.serving", *ARMS, "--out", tmp_path, *words, "--levels", 4)
    done = run(*command, "--rounds", 1)
    assert done.code == 0, done.err
    loads = [one for one in read_results(tmp_path / "results.jsonl") if isinstance(one, Load)]
    assert len(loads) == 4 * 3
    for load in loads:
        assert load.error == ""
        assert load.new_tokens == 3
        assert load.report["arm"] == ("reuse" if load.arm in ("turbo", "plain") else "dense")
        assert load.late_s >= 0
        assert load.latency_s >= load.ttft_s > 0
        assert load.arm == "prefix" or load.report["cached_tokens"] == 0
    assert all(load.report["reused_tokens"] > 0 for load in loads if load.arm in ("turbo", "plain"))
    again = run(*command, "--rounds", 1)
    assert (again.code, again.out) == (0, done.out)


def test_answers_of_a_server_that_runs(main: Server, world: World, tmp_path: Path):
    """The embedded engine and the server answer the same questions alike."""
    words = ("--model", "nano", "--arms", "turbo", "--contexts", 1, "--questions", 2, "--tasks", "single")
    lengths = ("--tokens", 300, 400, "--documents", 2, 2, "--only", "quality")
    texts = {}
    for engine in (f"sglang={main.url}", "embedded"):
        out = tmp_path / engine.partition("=")[0]
        command = (sys.executable, "-m", "eval.nanoqa", *words, *lengths, "--engine", engine, "--out", out)
        done = run(*command, "--store", world.store)
        assert done.code == 0, done.err
        records = list(read_results(out / "results.jsonl"))
        found = [one for one in records if isinstance(one, Answer)]
        assert {one.arm for one in found} == {"recompute", "turbo", "no-documents"}
        assert all(one.report["arm"] == "reuse" for one in found if one.arm == "turbo")
        texts[out.name] = {(one.item, one.arm): one.text for one in found}
        [first] = [one for one in records if isinstance(one, Run)]
        assert first.engine == out.name
    assert texts["sglang"] == texts["embedded"]


def test_a_profile_that_the_server_does_not_have(main: Server, world: World, tmp_path: Path):
    words = ("--arms", "plain", "--out", tmp_path, "--store", world.store, "--url", main.url)
    done = run(sys.executable, "-m", "eval.serving", *words, "--documents", 4, "--document-tokens", 160)
    assert done.code == 2
    assert "does not have profile plain; start it with --redknot-config FILE" in done.err
    assert done.err.strip().count("\n") == 0
