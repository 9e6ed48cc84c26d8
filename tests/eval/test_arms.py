"""Arms by shipped name, by name of a file, by path; what is unknown or ambiguous is refused."""

from __future__ import annotations

import json

import pytest

from eval.arms import find_arms
from eval.names import RECOMPUTE
from redknot.errors import ConfigError
from redknot.model.profile import SHIPPED, Profile


def test_recompute_is_always_the_first():
    assert list(find_arms(["turbo", "rowsparse"])) == [RECOMPUTE, "turbo", "rowsparse"]
    assert list(find_arms([RECOMPUTE, RECOMPUTE])) == [RECOMPUTE]
    assert find_arms([])[RECOMPUTE].profile == SHIPPED[RECOMPUTE]


def test_files_of_the_repository_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arm = find_arms(["plain"])["plain"]
    assert arm.profile.name == "plain"
    assert arm.source.endswith("configs/profiles/plain.json")


def test_files_of_the_current_folder_come_first_and_paths_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs/profiles").mkdir(parents=True)
    own = Profile(name="plain", budget=0.5)
    (tmp_path / "configs/profiles/plain.json").write_text(own.model_dump_json())
    (tmp_path / "mine.json").write_text(Profile(name="mine").model_dump_json())
    arms = find_arms(["plain", "mine.json"])
    assert arms["plain"].profile == own
    assert arms["mine"].source == str(tmp_path / "mine.json")


@pytest.mark.parametrize(
    ("content", "named", "message"),
    [
        (None, "absent", "neither a file nor one of recompute, headsplit, combined, rowsparse, turbo, adaptive-80"),
        ({"name": "turbo"}, "a.json,turbo", "another arm is named 'turbo'"),
        ({"name": "no-documents"}, "a.json", "'no-documents' is taken"),
        ({"name": "a", "budgets": 1}, "a.json", "budgets"),
    ],
)
def test_what_is_refused(content, named, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        find_arms(named.split(","))
