"""Configurations of models that can be described without their checkpoint: ``configs/*.json``.

DeepSeek-V4-Flash and -Pro, in the spelling of DeepSeek's own ``config.json``. `redknot layout` and the tests read
their geometry from here.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from redknot.errors import ConfigError

PUBLISHED = ("flash", "pro")


def published_config(name: str) -> dict[str, Any]:
    """The configuration with exactly this name; raises ConfigError when there is none."""
    if name not in PUBLISHED:
        raise ConfigError(f"no published configuration is named {name!r}; there are: {', '.join(PUBLISHED)}")
    text = files("redknot.model").joinpath("configs", f"{name}.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config
