"""Who goes first."""

from __future__ import annotations

from collections.abc import Sequence


def order(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: every name goes first in turn, and every other round runs backwards."""
    first = number // 2 % len(names)
    found = [*names[first:], *names[:first]]
    return found[::-1] if number % 2 else found
