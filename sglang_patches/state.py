"""What a rank says of itself when it is asked for its internal state."""

from __future__ import annotations

from typing import Any

from sglang_patches.serving import engine


def internal_state(result: Any, *_: Any, **__: Any) -> Any:
    """Hook: after a rank gathered its state; rank 0 answers."""
    found = engine()
    if found is not None:
        result.internal_state["redknot"] = found.state()
    return result
