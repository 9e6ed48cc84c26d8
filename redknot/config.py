"""What the environment decides, read once into a frozen value. No other module reads the environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from redknot.errors import ConfigError

CACHE_DIR = "REDKNOT_CACHE_DIR"
LOG_LEVEL = "REDKNOT_LOG_LEVEL"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True)
class Settings:
    """Where caches live and how much is logged."""

    cache_dir: Path  # weight hashes; may be deleted at any time
    log_level: int  # as the logging module counts


def load_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read ``REDKNOT_CACHE_DIR``, ``XDG_CACHE_HOME`` and ``REDKNOT_LOG_LEVEL``; ConfigError for an unknown level."""
    found = os.environ if environment is None else environment
    level = found.get(LOG_LEVEL) or "WARNING"
    if level.upper() not in LOG_LEVELS:
        raise ConfigError(f"{LOG_LEVEL}={level!r} is none of {', '.join(LOG_LEVELS)}")
    return Settings(_cache_dir(found), logging.getLevelNamesMapping()[level.upper()])


def _cache_dir(found: Mapping[str, str]) -> Path:
    if found.get(CACHE_DIR):
        return Path(found[CACHE_DIR]).absolute()
    base = Path(found.get("XDG_CACHE_HOME") or "")
    if not base.is_absolute():  # the XDG specification says to ignore relative paths
        base = Path(os.path.expanduser("~")) / ".cache"
    return base / "redknot"
