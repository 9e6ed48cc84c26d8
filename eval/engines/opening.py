"""Open the engine that ``--engine`` names."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from eval.arms import Arm
from eval.engines.base import ArmEngine
from redknot.errors import ConfigError

EMBEDDED, SGLANG = "embedded", "sglang"


def parse_engine(given: str) -> tuple[str, str | None]:
    """Name and URL of ``embedded``, ``sglang`` or ``sglang=URL``; ConfigError for anything else."""
    name, equals, url = given.partition("=")
    if name not in (EMBEDDED, SGLANG) or (equals and (name == EMBEDDED or not url)):
        raise ConfigError(f"--engine {given}: it must be embedded, sglang (starts servers) or sglang=URL")
    return name, url or None


def open_engine(given: str, model: Path, store: Path, arms: Mapping[str, Arm], tp: int) -> ArmEngine:
    """An engine over a checkpoint and a store of artifacts; RedKnotError when it cannot be had."""
    name, url = parse_engine(given)
    if name == EMBEDDED:
        from eval.engines.embedded import EmbeddedEngine

        if tp != 1:
            raise ConfigError(f"--tp {tp}: the embedded engine runs one rank; use --engine sglang")
        return EmbeddedEngine(model, store, arms)
    if importlib.util.find_spec("eval.engines.sglang") is None:
        raise ConfigError("--engine sglang is not part of this installation; use --engine embedded")
    opened = importlib.import_module("eval.engines.sglang").open_server(url, model, store, arms, tp)
    return cast(ArmEngine, opened)
