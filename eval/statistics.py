"""Means, quantiles and paired ratios with 95 % bootstrap intervals, seeded: equal input gives equal figures.

Items of one context are not independent, so contexts are resampled, each with all of its items (a cluster bootstrap).
All arms of a data set meet the same draws of contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from redknot.nano.shares import wilson

DRAWS = 2000
_TAILS = (0.025, 0.975)
_SEED = 0


@dataclass(frozen=True)
class Interval:
    """A figure and its 95 % interval; ``low`` and ``high`` are None where one context or round tells nothing of others.

    ``n``: how many values it is made from.
    """

    value: float
    low: float | None
    high: float | None
    n: int = 0

    def __format__(self, spec: str) -> str:
        """ "2.25 [2.10, 2.41]" where ``spec`` formats one number."""
        text = format(self.value, spec)
        if self.low is None or self.high is None:
            return text
        return f"{text} [{format(self.low, spec)}, {format(self.high, spec)}]"

    def scaled(self, factor: float) -> Interval:
        """In another unit; ``factor`` is above 0."""
        low, high = (None if side is None else side * factor for side in (self.low, self.high))
        return Interval(self.value * factor, low, high, self.n)


@dataclass(frozen=True)
class Drawn:
    """A mean, and what it was in each bootstrap draw; None where there was one cluster only."""

    value: float
    draws: NDArray[np.float64] | None  # [DRAWS]
    n: int
    clusters: int

    def interval(self, limits: tuple[float, float] | None = None) -> Interval:
        """The mean with its percentile interval.

        ``limits`` of what can be measured (a share's are 0 and 1): equal values in every cluster give equal draws,
        which is no certainty. Then what none of n items showed may still be a share of them: Wilson's interval.
        """
        if self.draws is None:
            return Interval(self.value, None, None, self.n)
        if limits is not None and np.ptp(self.draws) < 1e-6:
            unseen = wilson(0, self.n)[1]
            low, high = max(self.value - unseen, limits[0]), min(self.value + unseen, limits[1])
            return Interval(self.value, low, high, self.n)
        return _interval(self.value, self.draws, self.n)


def drawn_mean(values: ArrayLike, clusters: Sequence[str]) -> Drawn:
    """The mean of ``values`` [n], n at least 1, whose i-th item belongs to ``clusters[i]``; clusters are resampled."""
    found = np.asarray(values, dtype=float)
    _, of = np.unique(np.asarray(clusters, dtype=object).astype(str), return_inverse=True)
    sums, counts = np.bincount(of, weights=found), np.bincount(of)
    mean = float(found.mean())
    if len(counts) < 2:
        return Drawn(mean, None, len(found), 1)
    times = _resampled(len(counts))
    return Drawn(mean, (times @ sums) / (times @ counts), len(found), len(counts))


def averaged(parts: Sequence[Drawn]) -> Drawn:
    """The mean of several means, each weighing the same: data sets are drawn apart from each other, in turn."""
    value = float(np.mean([part.value for part in parts]))
    n, clusters = sum(part.n for part in parts), sum(part.clusters for part in parts)
    rows = [part.draws for part in parts]
    if any(row is None for row in rows):
        return Drawn(value, None, n, clusters)
    # Equal numbers of contexts meet equal draws: rolled, those of one data set are independent of the next one's.
    rolled = [np.roll(row, 97 * number) for number, row in enumerate(rows) if row is not None]
    return Drawn(value, np.mean(rolled, axis=0), n, clusters)


def clustered_mean(values: ArrayLike, clusters: Sequence[str]) -> Interval:
    """``drawn_mean`` as an interval; of paired differences it is the paired difference of the means."""
    return drawn_mean(values, clusters).interval()


def clustered_quantile(values: ArrayLike, clusters: Sequence[str], q: float) -> Interval:
    """The ``q`` quantile (nearest rank) of ``values`` [n], n at least 1; clusters are resampled."""
    found = np.asarray(values, dtype=float)
    order = np.argsort(found, kind="stable")
    _, of = np.unique(np.asarray(clusters, dtype=object).astype(str), return_inverse=True)
    value, number = float(quantile(found, q)), int(of.max()) + 1
    if number < 2:
        return Interval(value, None, None, len(found))
    draws = np.empty(DRAWS)
    for start in range(0, DRAWS, 100):  # blocks of 100 draws bound the memory at 100 numbers a value
        times = _resampled(number)[start : start + 100, of[order]].cumsum(axis=1)
        draws[start : start + 100] = found[order][(times < q * times[:, -1:]).sum(axis=1)]
    return _interval(value, draws, len(found))


def quantile(values: ArrayLike, q: float) -> float:
    """The ``q`` quantile (nearest rank) of at least one value: a value that was measured, not one between two."""
    return float(np.quantile(np.asarray(values, dtype=float), q, method="inverted_cdf"))


def ratio(over: ArrayLike, under: ArrayLike, seed: int = _SEED) -> Interval:
    """Median of over[i] / under[i] and its bootstrap interval over pairs; both [n], n at least 1, ``under`` above 0."""
    values = np.asarray(over, dtype=float) / np.asarray(under, dtype=float)
    rng = np.random.default_rng(seed)
    value = float(np.median(values))
    if len(values) < 2:
        return Interval(value, None, None, len(values))
    medians = [np.median(rng.choice(values, size=(100, len(values))), axis=1) for _ in range(DRAWS // 100)]
    return _interval(value, np.concatenate(medians), len(values))


def _interval(value: float, draws: NDArray[np.float64], n: int) -> Interval:
    low, high = np.quantile(draws, _TAILS)
    return Interval(value, float(low), float(high), n)


@lru_cache(maxsize=4)
def _resampled(clusters: int) -> NDArray[Any]:
    """How often each draw takes each cluster, [DRAWS, clusters] float32; every row adds up to ``clusters``."""
    rng = np.random.default_rng([_SEED, clusters])
    return rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=DRAWS).astype(np.float32)
