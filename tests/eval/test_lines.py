"""Reading published files: what is a row, and one line naming the place of whatever is wrong."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from eval.lines import read_records
from redknot.errors import InputError


def write(folder: Path, content: bytes, name: str = "f.jsonl") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("name", ["f.jsonl", "f.jsonl.gz", "f.JSONL.GZ"])
def test_objects_come_in_order_with_their_lines(tmp_path, name):
    path = tmp_path / name
    content = '\ufeff{"a": 1}\n\n  \r\n{"a": "line\u2028separator \u00e9"}'.encode()
    path.write_bytes(gzip.compress(content) if name.lower().endswith(".gz") else content)
    found = list(read_records(path))
    assert [record.fields for record in found] == [{"a": 1}, {"a": "line\u2028separator é"}]
    assert [record.source for record in found] == [f"{path}:1", f"{path}:4"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": \n', "F:2: not JSON"),
        (b'{"a": 1}\n[1]\n', "F:2: must be a JSON object, not a list"),
        (b'{"a": 1}\n3', "F:2: must be a JSON object, not a number"),
        (b'{"a": 1}\nnull', "F:2: must be a JSON object, not null"),
        (b'{"a": 1}\n{"a": "\xff"}\n', "F:2: not UTF-8 at byte 7 of the line"),
        (b"[" * 100_000, "F:1: not JSON"),
        (b"\n \n", "F: holds no rows"),
        (b"", "F: holds no rows"),
    ],
)
def test_what_cannot_be_read(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(InputError) as error:
        list(read_records(path))
    assert str(error.value).replace(str(path), "F").startswith(message)
    assert "\n" not in str(error.value)


def test_a_torn_gzip_file_names_the_line_it_breaks_at(tmp_path):
    path = write(tmp_path, b'{"a": 1}\n' * 2, "f.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"f\.jsonl\.gz:\d: not readable"):
        list(read_records(path))
    path.write_bytes(b"plain")
    with pytest.raises(InputError, match=r"f\.jsonl\.gz: not readable"):
        list(read_records(path))


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(InputError, match=r"none\.jsonl: no such file"):
        list(read_records(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match="not readable"):
        list(read_records(tmp_path))


@pytest.mark.parametrize(
    ("field", "getter", "message"),
    [
        ('"b": 1', "text", 'no field "a"; it has b'),
        ('"a": 1', "text", '"a" must be a text, not a number'),
        ('"a": null', "text", '"a" must be a text, not null'),
        (r'"a": "x\ud800"', "text", '"a" holds a lone surrogate at character 1'),
        ('"a": "x"', "texts", '"a" must be a list of at least one text, not a text'),
        ('"a": []', "texts", '"a" must be a list of at least one text, not an empty list'),
        ('"a": ["x", true]', "texts", '"a", item 1, must be a text, not true'),
        ('"a": "7"', "count", "\"a\" must be a whole number of at least 0, not '7'"),
        ('"a": true', "count", '"a" must be a whole number of at least 0, not True'),
        ('"a": -1', "count", '"a" must be a whole number of at least 0, not -1'),
        ('"a": 1.0', "count", '"a" must be a whole number of at least 0, not 1.0'),
    ],
)
def test_fields_are_checked(tmp_path, field, getter, message):
    path = write(tmp_path, b"{" + field.encode() + b"}")
    (record,) = read_records(path)
    with pytest.raises(InputError) as error:
        getattr(record, getter)("a")
    assert str(error.value) == f"{path}:1: {message}"
