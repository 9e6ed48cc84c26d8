"""Reading a corpus: what becomes a document, what is a problem with its place, what is only counted."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from redknot.build import documents
from redknot.build.documents import CorpusReport, Document, read_corpus
from redknot.errors import InputError
from tests.kit.corpus import write_lines


def read(path: Path) -> tuple[list[Document], CorpusReport]:
    report = CorpusReport()
    return list(read_corpus(path, report)), report


def problems(path: Path) -> list[str]:
    return [str(problem).replace(str(path), "C") for problem in read(path)[1].problems]


def test_a_folder_is_read_recursively_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.md").write_text("two")
    (tmp_path / "a.TXT").write_text("one")
    (tmp_path / "sub" / "a.txt").write_text("five")
    write_lines(tmp_path / "c.jsonl", [{"id": "x", "text": "three", "more": [1]}])
    write_lines(tmp_path / "c.jsonl.gz", [{"id": 7, "text": "four"}, "", {"text": "line three", "id": "y"}])
    found, report = read(tmp_path)
    assert [(d.name, d.text, d.source.removeprefix(f"{tmp_path}/")) for d in found] == [
        ("a.TXT", "one", "a.TXT"),
        ("b.md", "two", "b.md"),
        ("x", "three", "c.jsonl:1"),
        ("7", "four", "c.jsonl.gz:1"),
        ("y", "line three", "c.jsonl.gz:3"),
        ("sub/a.txt", "five", "sub/a.txt"),
    ]
    assert report == CorpusReport()


def test_a_single_file(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("text")
    assert read(path)[0] == [Document("one.txt", "text", str(path))]


@pytest.mark.parametrize("name", ["missing", "missing.txt", "here.pdf"])
def test_no_corpus(tmp_path, name):
    (tmp_path / "here.pdf").write_text("text")
    with pytest.raises(InputError, match=name):
        read(tmp_path / name)


def test_text_is_kept_byte_for_byte_except_the_byte_order_mark(tmp_path):
    text = " \r\nline\r\n\ttab\u2028日本 \N{GRINNING FACE}\x00 "
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    line = '{"id": "b", "text": "\\ufeffkept"}\r\n'
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + line.encode())
    assert [d.text for d in read(tmp_path)[0]] == [text, "\ufeffkept"]


@pytest.mark.parametrize("text", ["", " \n\t\u3000\r\n"])
def test_documents_without_text_are_counted(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    write_lines(tmp_path / "b.jsonl", [{"id": "b", "text": text}])
    found, report = read(tmp_path)
    assert (found, report.empty, report.problems) == ([], 2, [])


def test_other_and_hidden_files_are_counted(tmp_path):
    for name in ("a.pdf", "b", ".hidden.txt", ".git/c.txt", "d.txt.bak"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folder.txt").mkdir()
    found, report = read(tmp_path)
    assert (found, report.ignored_files, report.problems) == ([], 5, [])


@pytest.mark.parametrize(("data", "offset"), [(b"abc\xff", 3), (b"\xef\xbb\xbfab\xff", 5), (b"ab\xe6\x97", 2)])
def test_undecodable_text_names_file_and_offset(tmp_path, data, offset):
    (tmp_path / "a.txt").write_bytes(data)
    assert problems(tmp_path) == [f"C/a.txt: not UTF-8 at byte {offset}"]


def test_undecodable_line_names_line_and_offset_in_the_file(tmp_path):
    good = b'{"id": "a", "text": "t"}\n'
    (tmp_path / "a.jsonl").write_bytes(good + b'{"id": "b", "text": "\xff"}\n' + good.replace(b'"a"', b'"c"'))
    found, report = read(tmp_path)
    assert [d.name for d in found] == ["a", "c"]
    assert [str(p) for p in report.problems] == [f"{tmp_path}/a.jsonl:2: not UTF-8 at byte {len(good) + 21}"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("nonsense", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"id": "a", "text": ' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON"),
        ('{"id": ' + "[" * 500 + "]" * 500 + ', "text": "t"}', '"id" is missing'),
        ("[1]", "not a JSON object"),
        ('"text"', "not a JSON object"),
        ('{"text": "t"}', '"id" is missing'),
        ('{"id": "", "text": "t"}', '"id" is missing'),
        ('{"id": null, "text": "t"}', '"id" is missing'),
        ('{"id": true, "text": "t"}', '"id" is missing'),
        ('{"id": 1.5, "text": "t"}', '"id" is missing'),
        ('{"id": "a"}', '"text" is missing'),
        ('{"id": "a", "text": 5}', '"text" is missing'),
        ('{"id": "a\\u0007", "text": "t"}', "cannot be printed"),
        ('{"id": "\\ud800", "text": "t"}', "cannot be printed"),
    ],
)
def test_malformed_lines_name_the_line_and_spare_the_others(tmp_path, line, message):
    write_lines(tmp_path / "a.jsonl", [{"id": "first", "text": "t"}, line, {"id": "last", "text": "t"}])
    found, report = read(tmp_path)
    assert [d.name for d in found] == ["first", "last"]
    assert [problem.source for problem in report.problems] == [f"{tmp_path}/a.jsonl:2"]
    assert message in report.problems[0].message


def test_a_name_is_used_once(tmp_path):
    (tmp_path / "a.txt").write_text("file")
    write_lines(
        tmp_path / "b.jsonl", [{"id": "a.txt", "text": "other"}, {"id": 1, "text": "x"}, {"id": "1", "text": "y"}]
    )
    assert [d.text for d in read(tmp_path)[0]] == ["file", "x"]
    assert problems(tmp_path) == [
        "C/b.jsonl:1: the name 'a.txt' is taken by C/a.txt",
        "C/b.jsonl:3: the name '1' is taken by C/b.jsonl:2",
    ]


def test_a_damaged_gzip_file_keeps_what_could_be_read(tmp_path):
    path = write_lines(tmp_path / "a.jsonl.gz", [{"id": n, "text": os.urandom(999).hex()} for n in range(200)])
    path.write_bytes(path.read_bytes()[:100_000])
    (tmp_path / "b.jsonl.gz").write_bytes(b"no gzip")
    found, report = read(tmp_path)
    assert 10 < len(found) < 200
    assert len(report.problems) == 2
    assert report.problems[0].source == f"{tmp_path}/a.jsonl.gz:{len(found) + 1}"
    assert all("not readable" in problem.message for problem in report.problems)


def test_a_line_too_long_to_be_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 1000)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as handle:
        handle.write(b'{"id": "a", "text": "t"}\n' + b" " * 5000)
    found, report = read(tmp_path)
    assert [d.name for d in found] == ["a"]
    assert "more than 1000 bytes" in report.problems[0].message


def test_names_that_are_not_utf8(tmp_path):
    with open(os.fsencode(tmp_path) + b"/a\xff.txt", "w") as handle:
        handle.write("text")
    (tmp_path / "b.txt").write_text("text")
    found, report = read(tmp_path)
    assert [d.name for d in found] == ["b.txt"]
    assert report.problems[0].source == f"{tmp_path}/a\\xff.txt"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_files_and_folders(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.txt").chmod(0)
    (tmp_path / "b").mkdir(mode=0)
    found, report = read(tmp_path)
    assert found == []
    assert len(report.problems) == 2


def test_linked_folders_are_named(tmp_path):
    """They are not read, and that is said: they could lead in a circle."""
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    corpus.mkdir()
    elsewhere.mkdir()
    (elsewhere / "a.txt").write_text("text")
    (corpus / "b.txt").write_text("text")
    (corpus / "more").symlink_to(elsewhere)
    (corpus / "circle").symlink_to(corpus)
    found, report = read(corpus)
    assert [d.name for d in found] == ["b.txt"]
    assert sorted(problem.source for problem in report.problems) == [f"{corpus}/circle", f"{corpus}/more"]
    assert all("linked folder" in problem.message for problem in report.problems)
