"""Any other SGLang than the one this was made for is refused in one line."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError

import pytest

from redknot.errors import ConfigError
from sglang_patches import plugin, versions
from tests.kit.child import ROOT


def test_the_installed_one_is_supported():
    versions.check_version()


def test_the_extra_installs_a_supported_one():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["sglang"] == [f"sglang=={version}" for version in versions.SUPPORTED]


@pytest.mark.parametrize("found", ["0.5.22", "0.5.23.post1", "0.6.0", ""])
def test_another_one_is_refused(found, monkeypatch):
    monkeypatch.setattr(versions, "version", lambda _: found)
    with pytest.raises(ConfigError) as caught:
        versions.check_version()
    assert str(caught.value) == f"sglang {found} is installed; supported: 0.5.23"


def test_none_is_refused(monkeypatch):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(ConfigError, match=r"^sglang is not installed; supported: 0\.5\.23$"):
        versions.check_version()


def test_the_plugin_ends_the_process_with_that_line(monkeypatch, capsys):
    monkeypatch.setattr(versions, "version", lambda _: "0.6.0")
    monkeypatch.setattr("sys.argv", ["server", "--enable-redknot"])
    with pytest.raises(SystemExit) as caught:
        plugin.load()
    assert caught.value.code == 2
    assert capsys.readouterr().err == "redknot: sglang 0.6.0 is installed; supported: 0.5.23\n"


def test_the_plugin_does_not_care_when_it_is_not_wanted(monkeypatch):
    monkeypatch.setattr(versions, "version", lambda _: "0.6.0")
    monkeypatch.setattr("sys.argv", ["server"])
    plugin.load()
