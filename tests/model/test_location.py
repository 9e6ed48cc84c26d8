"""A checkpoint by folder, or nano by name."""

from __future__ import annotations

from redknot.model.location import find_checkpoint
from tests.kit.corpus import ROOT


def test_nano_is_the_shipped_one_unless_there_is_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("nano") == ROOT / "models/nano"
    (tmp_path / "nano").mkdir()
    assert find_checkpoint("nano") == tmp_path / "nano"


def test_a_folder_is_absolute_and_a_file_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "file").touch()
    assert find_checkpoint("model") == tmp_path / "model"
    assert find_checkpoint("file") is None
    assert find_checkpoint("absent") is None
