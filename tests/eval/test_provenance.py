"""Where results come from: the commit and whether files differ from it, the machine, the model's hashes."""

from __future__ import annotations

import subprocess

from eval.arms import find_arms
from eval.provenance import commit, make_run


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_a_commit_and_what_differs_from_it(tmp_path):
    assert commit(tmp_path) == ""
    git(tmp_path, "init")
    assert commit(tmp_path) == ""
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "one")
    found = commit(tmp_path)
    assert len(found) == 40
    (tmp_path / "results").write_text("what a run writes does not make it another commit")
    assert commit(tmp_path) == found
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path) == found + "+"
    (tmp_path / "inside").mkdir()
    assert commit(tmp_path / "inside") == ""


def test_a_run_names_model_arms_and_machine(checkpoint):
    arms = find_arms(["turbo"])
    run = make_run("ruler", checkpoint, arms, {"limit": 3}, engine="embedded", tp=1, command=["x"])
    assert run.model.keys() == {"name", "config", "weights", "tokenizer", "dtype"}
    assert run.digests["turbo"] == arms["turbo"].profile.digest()
    assert run.arms["turbo"]["fence_layers"] == 0
    assert run.hardware["cores"] >= run.hardware["threads"] >= 1
    assert run.versions.keys() == {"redknot", "python", "torch"}
    assert run.run != make_run("ruler", checkpoint, arms, {}, engine="embedded", tp=1).run
