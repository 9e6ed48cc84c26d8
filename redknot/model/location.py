"""Where a checkpoint lies that somebody named: a folder, or ``nano``, which comes with RedKnot."""

from __future__ import annotations

from pathlib import Path

_NANO = "nano"
_SHIPPED_NANO = Path(__file__).resolve().parents[2] / "models" / "nano"


def find_checkpoint(given: str) -> Path | None:
    """The absolute folder; ``nano`` is the shipped one, unless a folder has that name. None without a folder."""
    path = Path(given)
    if given == _NANO and not path.exists() and _SHIPPED_NANO.is_dir():
        return _SHIPPED_NANO
    return path.absolute() if path.is_dir() else None
