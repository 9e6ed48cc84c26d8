"""Published data files: JSON lines, plain or gzipped, one object a line, every error with its file and line."""

from __future__ import annotations

import gzip
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from redknot.errors import InputError


class Record:
    """One object of a file, and where it stands; its getters raise InputError that names the place."""

    def __init__(self, fields: dict[str, Any], source: str) -> None:
        self.fields = fields
        self.source = source  # "file:line"

    def refuse(self, message: str) -> InputError:
        """The error to raise about this record."""
        return InputError(f"{self.source}: {message}")

    def value(self, name: str) -> Any:
        """A field that has to be there."""
        try:
            return self.fields[name]
        except KeyError:
            raise self.refuse(f'no field "{name}"; it has {", ".join(sorted(self.fields)) or "none"}') from None

    def text(self, name: str) -> str:
        """A field that holds a text, maybe an empty one."""
        return self._text(self.value(name), f'"{name}"')

    def texts(self, name: str) -> tuple[str, ...]:
        """A field that holds a list of at least one text."""
        value = self.value(name)
        if not isinstance(value, list) or not value:
            raise self.refuse(f'"{name}" must be a list of at least one text, not {_kind(value)}')
        return tuple(self._text(item, f'"{name}", item {number},') for number, item in enumerate(value))

    def count(self, name: str) -> int:
        """A field that holds a whole number of at least zero."""
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refuse(f'"{name}" must be a whole number of at least 0, not {value!r:.40}')
        return value

    def _text(self, value: object, what: str) -> str:
        if not isinstance(value, str):
            raise self.refuse(f"{what} must be a text, not {_kind(value)}")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.refuse(f"{what} holds a lone surrogate at character {error.start}") from None
        return value


def read_records(path: Path) -> Iterator[Record]:
    """The objects of a file in order, blank lines left out; InputError when it cannot be read or holds none."""
    number, found = 0, False
    try:
        with _open(path) as handle:
            for line in handle:
                number += 1
                content = line.removeprefix(BOM_UTF8) if number == 1 else line
                if content.strip():
                    found = True
                    yield _record(content, f"{path}:{number}")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        place = f"{path}:{number + 1}" if number else str(path)
        raise InputError(f"{place}: not readable ({getattr(error, 'strerror', None) or error})") from None
    if not found:
        raise InputError(f"{path}: holds no rows")


def _open(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else open(path, "rb")


def _record(line: bytes, source: str) -> Record:
    try:
        fields: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: not UTF-8 at byte {error.start} of the line") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise InputError(f"{source}: must be a JSON object, not {_kind(fields)}")
    return Record(fields, source)


def _kind(value: object) -> str:
    """What a JSON value is, in words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list) and not value:
        return "an empty list"
    return {str: "a text", list: "a list", dict: "an object"}.get(type(value), "a number")
