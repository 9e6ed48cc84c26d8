"""Sides that are timed in turns; `eval.statistics.ratio` compares two of them, paired by round."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

from eval.turns import order


def timed(run: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    """Seconds of this thread's processor, so that others who want it count less; of what waits, use another clock.

    What earlier work left to the garbage collector is collected before, not within.
    """
    gc.collect()
    start = clock()
    run()
    return clock() - start


def in_turns(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each side returns in each round. Every side goes first in turn, and every other round runs backwards."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in order(list(sides), number):
            found[name].append(sides[name]())
    return found
