"""What must be known of a command line before SGLang parses it: whether to serve with RedKnot, and on what device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    given = _from_file(_value(argv, ("--config",)))
    device = _value(argv, ("--device",)) or given.get("device")
    size = _value(argv, ("--tp-size", "--tensor-parallel-size", "--tp"))
    if size is None:
        size = str(given.get("tp-size", given.get("tensor-parallel-size", given.get("tp", 1))))
    return Wish(
        enabled=ENABLE in argv or given.get("enable-redknot") is True,
        device=None if device is None else str(device),
        tp_size=int(size) if size.isascii() and size.isdigit() and int(size) else 1,
        help="-h" in argv or "--help" in argv,
    )


def _value(argv: Sequence[str], names: Sequence[str]) -> str | None:
    """The last value of an option, as the parser takes it."""
    found = None
    for number, word in enumerate(argv):
        name, separator, value = word.partition("=")
        if name in names:
            found = value if separator else argv[number + 1] if number + 1 < len(argv) else None
    return found


def _from_file(path: str | None) -> Mapping[str, Any]:
    if path is None:
        return {}
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    if not isinstance(content, Mapping):
        return {}
    return {str(key).replace("_", "-"): value for key, value in content.items()}
