"""Builds beside a server, with a builder in miniature: one at a time, each with an end that is told."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from redknot.artifact.store import ArtifactStore
from sglang_patches import builds as module
from sglang_patches.builds import Build, Builds
from tests.artifact import kit

_LIMIT_S = 60


@pytest.fixture
def builder(tmp_path: Path) -> Iterator[Callable[[str], Builds]]:
    """Builds whose builder runs source text; it is given the namespace and the corpus."""
    made = []

    def make(source: str) -> Builds:
        builds = Builds(tmp_path / "model", tmp_path / "store", "rowsparse", 2)
        builds._command = [sys.executable, "-c", source]
        made.append(builds)
        return builds

    yield make
    for builds in made:
        builds.close()


def ended(build: Build) -> Build:
    limit = time.monotonic() + _LIMIT_S
    while build.state not in ("done", "failed") or not build.seconds:
        assert time.monotonic() < limit, build
        time.sleep(0.01)
    return build


def test_the_command_is_the_offline_builder():
    builds = Builds(Path("m"), Path("s"), "turbo", 4)
    assert builds._command[1:] == ("-m redknot build --json --model m --store s --profile turbo --tp-size 4".split())
    builds.close()


def test_a_build_that_succeeds(builder):
    source = """
import json, os, sys
namespace, corpus = sys.argv[2:]
print(json.dumps({"namespace": namespace, "nice": os.nice(0), "server": os.environ.get("REDKNOT_SGLANG"),
                  "corpus": [json.loads(line) for line in open(corpus, encoding="utf-8")]}))
print("a warning", file=sys.stderr)
"""
    documents = [("a", "text\nof two lines"), ("b", "überall \ud800")]
    build = ended(builder(source).start("mine", documents))
    assert (build.state, build.error) == ("done", None)
    assert build.result is not None
    assert build.result["namespace"] == "mine"
    assert build.result["nice"] >= 10
    assert build.result["server"] is None
    assert build.result["corpus"] == [{"id": name, "text": text} for name, text in documents]
    assert build.seconds > 0


@pytest.mark.parametrize(
    ("source", "error", "result"),
    [
        ("import sys; print('first', file=sys.stderr); sys.exit('the last line')", "the last line", None),
        ("import sys; sys.exit(3)", "the builder ended with 3", None),
        ("import os; os.kill(os.getpid(), 9)", "the builder ended with -9", None),
        ("import sys; print('{\"built\": 1}'); sys.exit('one failed')", "one failed", {"built": 1}),
        ("import sys; print('not JSON'); sys.exit('the reason')", "the reason", None),
        ("print('not JSON')", "the builder's result cannot be read", None),
    ],
)
def test_a_build_that_fails_says_why(builder, source, error, result):
    build = ended(builder(source).start("mine", [("a", "b")]))
    assert (build.state, build.error, build.result) == ("failed", error, result)


def test_a_builder_that_cannot_start(builder):
    builds = builder("")
    builds._command = [str(Path(sys.executable).parent / "no-such-program")]
    build = ended(builds.start("mine", [("a", "b")]))
    assert build.state == "failed"
    assert "no-such-program" in (build.error or "")


def test_a_process_that_cannot_be_prepared(builder, monkeypatch):
    """subprocess tells this by an exception of its own; the build must not run for ever."""

    def fail() -> None:
        raise PermissionError

    monkeypatch.setattr(module, "_yield_to_requests", fail)
    build = ended(builder("").start("mine", [("a", "b")]))
    assert build.state == "failed"
    assert "preexec_fn" in (build.error or "")


def test_builds_wait_for_each_other_and_belong_to_a_namespace(builder, tmp_path):
    gate = tmp_path / "gate"
    source = f"""
import pathlib, time
while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)
print("{{}}")
"""
    builds = builder(source)
    first, second = builds.start("mine", [("a", "b")]), builds.start("other", [("a", "b")])
    assert first.build_id != second.build_id
    limit = time.monotonic() + _LIMIT_S
    while first.state != "running":
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert second.state == "queued"
    assert builds.get(first.build_id, "mine") is first
    assert builds.get(first.build_id, "other") is None
    assert builds.get("0", "mine") is None
    gate.touch()
    assert (ended(first).state, ended(second).state) == ("done", "done")


def test_old_builds_are_forgotten(builder, monkeypatch):
    monkeypatch.setattr(module, "_KEPT", 2)
    builds = builder("print('{}')")
    made = [builds.start("mine", [("a", "b")]) for _ in range(3)]
    assert [builds.get(build.build_id, "mine") is not None for build in made] == [False, True, True]
    ended(made[-1])


def test_progress_is_what_requests_can_reuse(tmp_path):
    with ArtifactStore(tmp_path / "store", create=True) as store:
        build = Build(kit.NAMESPACE, ("a", "b"))
        told: dict[str, Any] = build.to_dict(store)
        assert (told["state"], told["documents"], told["built"]) == ("queued", 2, 0)
        kit.publish(store, kit.draft(), kit.sections(), kit.TOKENS, ["a"])
        kit.publish(store, kit.draft(namespace="other"), kit.sections(), kit.TOKENS, ["b"])
        told = build.to_dict(store)
        assert told["built"] == 1
        json.dumps(told)
