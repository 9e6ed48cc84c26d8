"""Memory for sessions, every number of it NaN until somebody writes there."""

from __future__ import annotations

from typing import Any

from redknot.config import LatentSettings
from redknot.latents.sizing import sized_for
from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace
from redknot.model.geometry import Geometry

NAN = float("nan")
TOKENS = 70_000  # further than any test shifts a request


def nan_space(geometry: Geometry, **settings: Any) -> LatentSpace:
    """A space of its own, by ``settings``, else for any request of the model."""
    return LatentSpace(geometry, LatentSettings(**settings), fill=NAN)


def nan_memory(geometry: Geometry) -> Workspace:
    """A workspace in a space of its own, which ends when nobody refers to it any more."""
    enough = sized_for(geometry, [TOKENS])
    return Workspace(nan_space(geometry, device_bytes=enough.device_bytes, arena_bytes=enough.arena_bytes))
