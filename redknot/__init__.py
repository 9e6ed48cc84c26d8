"""RedKnot: faster first tokens for DeepSeek-V4 requests built from known documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redknot.runtime.engine import Engine

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> object:
    """Load the engine (and torch with it) on first use only."""
    if name == "Engine":
        from redknot.runtime.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
