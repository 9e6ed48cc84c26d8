"""Reading the ``config.json`` of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from redknot.errors import CheckpointError, ConfigError

_DEEPEST = 32  # objects and lists in one another; a real one has three


def read_config(checkpoint: Path) -> dict[str, Any]:
    """The configuration of a checkpoint folder; raises CheckpointError when it is missing or not a JSON object.

    ConfigError when it is nested so deeply that showing a value of it could fail.
    """
    path = checkpoint / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{checkpoint}: no config.json; give the folder of a DeepSeek-V4 checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    if _deeper_than(_DEEPEST, raw):
        raise ConfigError(f"{path}: nested more than {_DEEPEST} levels deep")
    return raw


def _deeper_than(levels: int, value: dict[str, Any]) -> bool:
    """Whether lists and objects lie in one another beyond so many levels, the outermost one counted."""
    found: list[dict[str, Any] | list[Any]] = [value]
    for _ in range(levels):
        inner = [item for one in found for item in (one.values() if isinstance(one, dict) else one)]
        found = [item for item in inner if isinstance(item, dict | list)]
    return bool(found)
