"""What must be known of a command line before SGLang parses it: whether to serve with RedKnot, and on what device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ENABLE = "--enable-redknot"


@dataclass(frozen=True)
class Wish:
    """``help``: somebody wants to read the options."""

    enabled: bool = False
    device: str | None = None
    tp_size: int = 1
    help: bool = False


def read_wish(argv: Sequence[str]) -> Wish:
    """Read a command line and the file that its ``--config`` names; the command line wins.

    What cannot be read is left for SGLang to complain about.
    """
    words = [*_from_file(argv), *argv]
    size = _value(words, ("--tp-size", "--tensor-parallel-size", "--tp")) or ""
    return Wish(
        enabled=ENABLE in words,
        device=_value(words, ("--device",)),
        tp_size=int(size) if size.isascii() and size.isdigit() and int(size) else 1,
        help="-h" in argv or "--help" in argv,
    )


def _value(words: Sequence[str], names: Sequence[str]) -> str | None:
    """The last value of an option, as the parser takes it."""
    found = None
    for number, word in enumerate(words):
        name, separator, value = word.partition("=")
        if name in names:
            found = value if separator else words[number + 1] if number + 1 < len(words) else None
    return found


def _from_file(argv: Sequence[str]) -> list[str]:
    """A configuration file as words of a command line. As SGLang does it: ``--config=FILE`` is not read."""
    if "--config" not in argv[:-1]:
        return []
    try:
        content = yaml.safe_load(Path(argv[argv.index("--config") + 1]).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    words = []
    for key, value in content.items() if isinstance(content, Mapping) else ():
        words += [f"--{key}"] if value is True else [f"--{key}", str(value)] if value is not False else []
    return words
