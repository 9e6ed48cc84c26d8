"""A progress bar for people who watch."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress(total: int, unit: str, what: str) -> tqdm[Any]:
    """On stderr, and only where that is a terminal; nothing of it stays."""
    return tqdm(
        total=total, unit=unit, unit_scale=total > 10_000, desc=what, disable=None, file=sys.stderr, leave=False
    )
