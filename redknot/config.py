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
LATENT_BYTES = "REDKNOT_LATENT_BYTES"
LATENT_ARENA_BYTES = "REDKNOT_LATENT_ARENA_BYTES"
LATENT_HOST_BYTES = "REDKNOT_LATENT_HOST_BYTES"
LATENT_DISK_BYTES = "REDKNOT_LATENT_DISK_BYTES"
LATENT_EVICTION = "REDKNOT_LATENT_EVICTION"
EVICTIONS = ("lru", "cost")
LATENT_FOLDER = "latents"  # in the cache folder


@dataclass(frozen=True)
class LatentSettings:
    """How much an engine may hold of latents, in bytes; None is worked out from the model's geometry.

    Memory is taken from the system when it is first written to. On a CPU the device pool is memory as the host pool is,
    and artifacts are on disk already, so the two lower tiers are off unless asked for.
    """

    device_bytes: int | None = None  # blocks; None: four requests of the model's longest context
    arena_bytes: int | None = None  # windows and open tails of one request; None: one of the longest context
    host_bytes: int = 0
    disk_bytes: int = 0
    disk_folder: Path | None = None
    arenas: int = 2  # a request, and the probe that ranks its rows
    eviction: str = EVICTIONS[0]  # what leaves first: "lru", or "cost", which keeps what is dear to run again


@dataclass(frozen=True)
class Settings:
    """Where caches live, how much is logged, and how much is kept of latents."""

    cache_dir: Path  # weight hashes, the disk tier of latents; may be deleted at any time
    log_level: int  # as the logging module counts
    latents: LatentSettings


def load_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the variables named above and ``XDG_CACHE_HOME``; ConfigError for an unknown level or a bad number."""
    found = os.environ if environment is None else environment
    level = found.get(LOG_LEVEL) or "WARNING"
    if level.upper() not in LOG_LEVELS:
        raise ConfigError(f"{LOG_LEVEL}={level!r} is none of {', '.join(LOG_LEVELS)}")
    cache_dir = _cache_dir(found)
    latents = LatentSettings(
        device_bytes=_bytes(found, LATENT_BYTES),
        arena_bytes=_bytes(found, LATENT_ARENA_BYTES),
        host_bytes=_bytes(found, LATENT_HOST_BYTES) or 0,
        disk_bytes=_bytes(found, LATENT_DISK_BYTES) or 0,
        disk_folder=cache_dir / LATENT_FOLDER,
        eviction=_eviction(found),
    )
    return Settings(cache_dir, logging.getLevelNamesMapping()[level.upper()], latents)


def _eviction(found: Mapping[str, str]) -> str:
    name = found.get(LATENT_EVICTION) or EVICTIONS[0]
    if name not in EVICTIONS:
        raise ConfigError(f"{LATENT_EVICTION}={name!r} is none of {', '.join(EVICTIONS)}")
    return name


def _bytes(found: Mapping[str, str], name: str) -> int | None:
    text = found.get(name)
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{name}={text!r} is no number of bytes")
    return int(text)


def _cache_dir(found: Mapping[str, str]) -> Path:
    if found.get(CACHE_DIR):
        return Path(found[CACHE_DIR]).absolute()
    base = Path(found.get("XDG_CACHE_HOME") or "")
    if not base.is_absolute():  # the XDG specification says to ignore relative paths
        base = Path(os.path.expanduser("~")) / ".cache"
    return base / "redknot"
