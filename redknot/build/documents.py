"""Read a corpus: text files and JSON lines, one named document after the other, and what could not be read.

A document that cannot be used never stops the others. It is a *problem* (the build then ends with exit code 1) when
somebody has to repair something, and only counted when leaving it out is what one expects (no text, another file type).
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from redknot.errors import InputError

TEXT_SUFFIXES = (".txt", ".md")
LINE_SUFFIXES = (".jsonl", ".jsonl.gz")
SUFFIXES = (*TEXT_SUFFIXES, *LINE_SUFFIXES)
# Lines longer than this are not documents; a decompressed line must not eat the machine either.
MAX_LINE_BYTES = 2**28


@dataclass(frozen=True)
class Document:
    """One document as read: its name, its text, and "file" or "file:line"."""

    name: str
    text: str
    source: str


@dataclass(frozen=True)
class Problem:
    """Something a person must repair, in one line."""

    source: str
    message: str

    def __str__(self) -> str:
        return f"{self.source}: {self.message}"


@dataclass
class CorpusReport:
    """What reading left out."""

    problems: list[Problem] = field(default_factory=list)
    empty: int = 0  # documents without a visible character
    ignored_files: int = 0  # files of other types, and hidden ones

    def problem(self, source: str, message: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(source, message))


def read_corpus(corpus: Path, report: CorpusReport) -> Iterator[Document]:
    """Yield the documents below a folder, sorted by path, or those of one file; ``report`` gets what is left out.

    Text files are named by their path below the folder, lines by their "id". Names are unique: a second use is a
    problem. InputError when ``corpus`` is neither a folder nor a file of a known type.
    """
    seen: dict[str, str] = {}
    for path, name in _files(corpus, report):
        documents = _lines(path, report) if path.name.lower().endswith(LINE_SUFFIXES) else _text(path, name, report)
        for document in documents:
            if not document.name.isprintable():
                report.problem(document.source, f"the name {document.name!r} holds characters that cannot be printed")
            elif not document.text.strip():
                report.empty += 1
            elif document.name in seen:
                report.problem(document.source, f"the name {document.name!r} is taken by {seen[document.name]}")
            else:
                seen[document.name] = document.source
                yield document


def read_text(path: Path) -> str:
    """One text document as the builder reads it (a byte-order mark dropped, nothing else); InputError if it cannot."""
    try:
        data = path.read_bytes()
        return data.removeprefix(BOM_UTF8).decode("utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such document") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not readable as UTF-8 text ({error})") from None


def _files(corpus: Path, report: CorpusReport) -> Iterator[tuple[Path, str]]:
    """The files to read with the names of their documents."""
    if corpus.is_file():
        if not corpus.name.lower().endswith(SUFFIXES):
            raise InputError(f"{corpus} is none of {', '.join(SUFFIXES)}")
        yield corpus, corpus.name
        return
    if not corpus.is_dir():
        raise InputError(f"there is no folder or file {corpus}")

    def unreadable(error: OSError) -> None:
        report.problem(str(error.filename), f"not readable ({error.strerror})")

    found: list[tuple[tuple[str, ...], Path]] = []
    for folder, folders, names in os.walk(corpus, onerror=unreadable):
        linked = [name for name in folders if not name.startswith(".") and Path(folder, name).is_symlink()]
        for name in linked:  # followed, they could lead in a circle
            report.problem(str(Path(folder, name)), "a linked folder is not read; name it as a corpus of its own")
        folders[:] = [name for name in folders if not name.startswith(".") and name not in linked]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and name.lower().endswith(SUFFIXES) and path.is_file():
                found.append((path.relative_to(corpus).parts, path))
            else:
                report.ignored_files += 1
    for parts, path in sorted(found):
        yield path, "/".join(parts)


def _text(path: Path, name: str, report: CorpusReport) -> Iterator[Document]:
    """The one document of a text file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        report.problem(_shown(path), f"not readable ({error.strerror})")
        return
    text = _decoded(data, 0, _shown(path), report)
    if text is not None:
        yield Document(name, text, _shown(path))


def _lines(path: Path, report: CorpusReport) -> Iterator[Document]:
    """The documents of a file of JSON lines."""
    offset, number = 0, 0
    try:
        with _open(path) as handle:
            while line := handle.readline(MAX_LINE_BYTES):
                number += 1
                source, start = f"{_shown(path)}:{number}", offset
                offset += len(line)
                if len(line) == MAX_LINE_BYTES:
                    report.problem(source, f"a line of more than {MAX_LINE_BYTES} bytes; the rest is not read")
                    return
                if line.strip() and (text := _decoded(line, start, source, report)) is not None:
                    yield from _record(text, source, report)
    except (OSError, EOFError, zlib.error) as error:
        report.problem(f"{_shown(path)}:{number + 1}", f"not readable ({getattr(error, 'strerror', None) or error})")


def _open(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else open(path, "rb")


def _record(line: str, source: str, report: CorpusReport) -> Iterator[Document]:
    """The document of one JSON line."""
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        report.problem(source, f"not JSON ({error})")
        return
    if not isinstance(record, dict):
        report.problem(source, 'not a JSON object with "id" and "text"')
        return
    name, text = record.get("id"), record.get("text")
    if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        report.problem(source, '"id" is missing or neither a string nor an integer')
    elif not isinstance(text, str):
        report.problem(source, '"text" is missing or not a string')
    else:
        yield Document(str(name), text, source)


def _decoded(data: bytes, start: int, source: str, report: CorpusReport) -> str | None:
    mark = len(BOM_UTF8) if data.startswith(BOM_UTF8) and start == 0 else 0
    try:
        return data[mark:].decode("utf-8")
    except UnicodeDecodeError as error:
        report.problem(source, f"not UTF-8 at byte {start + mark + error.start}")
        return None


def _shown(path: Path) -> str:
    """A path that can be printed and stored, whatever bytes its name has."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
