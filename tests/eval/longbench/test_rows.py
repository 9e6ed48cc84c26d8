"""Rows as published, and what is refused with its place."""

from __future__ import annotations

import gzip

import pytest

from eval.longbench.rows import find_file, read_rows
from eval.longbench.tasks import task
from redknot.errors import InputError
from tests.kit.longbench import PASSAGES, ROW, write


def test_a_row(tmp_path):
    path = write(tmp_path / "f.jsonl")
    (row,) = read_rows(path)
    assert (row.task, row.id, row.input, row.context) == (task("hotpotqa"), "0f1e", ROW["input"], PASSAGES)
    assert (row.answers, row.classes, row.length) == (("green", "dark green"), (), 18)
    assert (row.language, row.source) == ("en", f"{path}:1")


def test_the_prompt_is_the_template_filled(tmp_path):
    (row,) = read_rows(write(tmp_path / "f.jsonl", {"input": "{context}?"}))
    assert row.frame.text == row.task.template.format(input="{context}?", context=PASSAGES)
    assert row.frame.context == PASSAGES


def test_sets_of_longbench_e_and_classes(tmp_path):
    path = write(tmp_path / "f.jsonl", {"dataset": "hotpotqa_e"}, {"dataset": "trec", "all_classes": ["A", "B"]})
    first, second = read_rows(path)
    assert first.task == task("hotpotqa")
    assert second.classes == ("A", "B")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "squad"}, "\"dataset\" is 'squad', which is no set of LongBench"),
        ({"dataset": "musique"}, '"dataset" is musique, expected hotpotqa'),
        ({"context": " \n"}, '"context" is empty'),
        ({"answers": []}, '"answers" must be a list of at least one text, not an empty list'),
        ({"answers": "green"}, '"answers" must be a list of at least one text, not a text'),
        ({"all_classes": "A"}, '"all_classes" must be a list of at least one text, not a text'),
        ({"length": "long"}, "\"length\" must be a whole number of at least 0, not 'long'"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, change, message):
    path = write(tmp_path / "f.jsonl", {}, change)
    with pytest.raises(InputError) as error:
        list(read_rows(path, task("hotpotqa")))
    assert str(error.value) == f"{path}:2: {message}"


@pytest.mark.parametrize("name", sorted(ROW))
def test_every_field_has_to_be_there(tmp_path, name):
    path = write(tmp_path / "f.jsonl", drop=name)
    with pytest.raises(InputError, match=rf'f\.jsonl:1: no field "{name}"; it has '):
        list(read_rows(path))


def test_classification_needs_its_classes(tmp_path):
    with pytest.raises(InputError, match=r"f\.jsonl:1: .*trec is scored against"):
        list(read_rows(write(tmp_path / "f.jsonl", {"dataset": "trec"})))


def test_files_are_found_by_their_published_names(tmp_path):
    hotpot = task("hotpotqa")
    with pytest.raises(InputError, match=r"no hotpotqa\.jsonl or hotpotqa\.jsonl\.gz"):
        find_file(tmp_path, hotpot)
    path = write(tmp_path / "hotpotqa.jsonl")
    write(tmp_path / "hotpotqa_e.jsonl")
    assert find_file(tmp_path, hotpot) == path
    assert find_file(tmp_path, hotpot, longbench_e=True).name == "hotpotqa_e.jsonl"
    packed = tmp_path / "hotpotqa.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(InputError, match="leave one of them"):
        find_file(tmp_path, hotpot)
    path.unlink()
    assert [row.id for row in read_rows(find_file(tmp_path, hotpot))] == ["0f1e"]
