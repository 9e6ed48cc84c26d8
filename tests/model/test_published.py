"""The configurations that ship with the package: found by exact name, in git and in the wheel."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from redknot.errors import ConfigError
from redknot.model import published
from redknot.model.published import PUBLISHED, published_config

ROOT = Path(__file__).resolve().parents[2]


def test_names_are_the_files() -> None:
    found = {path.stem for path in (Path(published.__file__).parent / "configs").iterdir()}
    assert found == set(PUBLISHED)
    assert published_config("flash") != published_config("pro")


@pytest.mark.parametrize("name", ["Flash", "flas", "", "../flash", "flash.json"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="there are: flash, pro"):
        published_config(name)


def test_a_copy_each_time() -> None:
    published_config("flash")["hidden_size"] = 1
    assert published_config("flash")["hidden_size"] == 4096


def test_the_package_declares_them() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["redknot"]
    assert "**/*.json" in declared
