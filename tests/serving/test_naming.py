"""Profiles by name: shipped ones, files, and the default; no name means two things."""

from __future__ import annotations

from pathlib import Path

import pytest

from redknot.errors import ConfigError
from redknot.model.profile import SHIPPED, load_profile
from redknot.serving.naming import named_profiles
from tests.kit.child import ROOT

PLAIN = str(ROOT / "configs" / "profiles" / "plain.json")


def test_names():
    default, named = named_profiles("turbo", [PLAIN, PLAIN])
    assert default == SHIPPED["turbo"]
    assert named == {**SHIPPED, "plain": load_profile(PLAIN)}
    default, named = named_profiles(PLAIN, [])
    assert named["plain"] == default


def other(folder: Path, name: str) -> str:
    path = folder / "other.json"
    path.write_text(SHIPPED["rowsparse"].model_copy(update={"name": name, "budget": 0.5}).model_dump_json())
    return str(path)


@pytest.mark.parametrize("name", ["rowsparse", "plain"])
def test_one_name_for_two(tmp_path, name):
    with pytest.raises(ConfigError, match=f"another profile '{name}'"):
        named_profiles("turbo", [PLAIN, other(tmp_path, name)])
    with pytest.raises(ConfigError, match=f"another profile '{name}'"):
        named_profiles(other(tmp_path, name), [PLAIN])


@pytest.mark.parametrize("name", ["prefix", "fan-out"])
def test_what_only_the_embedded_engine_runs(name):
    with pytest.raises(ConfigError, match="embedded engine"):
        named_profiles("turbo", [str(ROOT / "configs" / "profiles" / f"{name}.json")])


def test_no_profile(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        named_profiles("turbo", [str(tmp_path / "nowhere.json")])
