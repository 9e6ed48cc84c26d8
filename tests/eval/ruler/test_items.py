"""RULER rows as items: named by their files, whole or refused."""

from __future__ import annotations

import json

import pytest

from eval.encoder import Encoder
from eval.ruler.items import datasets
from redknot.errors import InputError
from tests.kit.corpus import document

FRAME = "Some special magic numbers are hidden within the following text.\n{}\nWhat is the special magic number for a?"


@pytest.fixture
def encoder(checkpoint):
    return Encoder.load(checkpoint)


def write(path, tokens=80):
    path.parent.mkdir(parents=True, exist_ok=True)
    row = {"index": 7, "input": FRAME.format(document(tokens)), "outputs": ["green"], "length": tokens}
    path.write_text(json.dumps(row))
    return path


def test_files_are_data_sets(tmp_path, encoder):
    files = [write(tmp_path / name) for name in ("a/validation.jsonl", "b/validation.jsonl", "vt.jsonl")]
    found = datasets(files, encoder, 40)
    assert [one.name for one in found] == ["a-validation", "b-validation", "vt"]
    (item,) = found[0].items()
    assert (item.dataset, item.id, item.max_new_tokens) == ("a-validation", "7", 128)
    assert sum(is_document for _, is_document in item.parts) >= 2
    assert item.score("It is GREEN.") == 1.0


def test_files_of_one_name_are_refused(tmp_path, encoder):
    with pytest.raises(InputError, match="2 files would be the data set a-x"):
        datasets([tmp_path / "1/a/x.jsonl", tmp_path / "2/a/x.jsonl"], encoder, 40)


def test_a_row_is_never_cut(tmp_path, encoder):
    (found,) = datasets([write(tmp_path / "long.jsonl", 560)], encoder, 40)
    with pytest.raises(InputError, match=r"long.jsonl:1: \d+ tokens, the model has room for 472"):
        list(found.items())
