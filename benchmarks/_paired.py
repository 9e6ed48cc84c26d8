"""Sides that are timed in turns, and the ratio between two of them: paired by round, with a bootstrap interval."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np


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
    names = list(sides)
    for number in range(rounds):
        first = number // 2 % len(names)
        order = names[first:] + names[:first]
        for name in reversed(order) if number % 2 else order:
            found[name].append(sides[name]())
    return found


def ratio(over: Sequence[float], under: Sequence[float], seed: int = 0) -> dict[str, float]:
    """Median of over[i] / under[i], and its 95 % bootstrap interval."""
    values = np.asarray(over) / np.asarray(under)
    draws = np.random.default_rng(seed).choice(values, size=(2000, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return {"median": float(np.median(values)), "low": float(low), "high": float(high)}
