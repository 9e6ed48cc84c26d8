"""Reading the ``config.json`` of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from redknot.errors import CheckpointError


def read_config(checkpoint: Path) -> dict[str, Any]:
    """The configuration of a checkpoint folder; raises CheckpointError when it is missing or not a JSON object."""
    path = checkpoint / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{checkpoint}: no config.json; give the folder of a DeepSeek-V4 checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return raw
