"""Scales, ticks and the frame of a plot with two axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.report.charts.svg import line, words


@dataclass(frozen=True)
class Scale:
    """Maps ``low``..``high`` to the pixels ``start``..``stop``; ``low`` is below ``high``, and above 0 with ``log``."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value; values outside lie on the edge."""
        inside = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(inside / self.low) / math.log(self.high / self.low)
        else:
            share = (inside - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, about: int = 6) -> list[float]:
        """Round values inside, roughly ``about`` of them."""
        return _log_ticks(self.low, self.high, about) if self.log else _even_ticks(self.low, self.high, about)


def widened(values: Sequence[float], least: float, share: float = 0.08) -> tuple[float, float]:
    """A range around values: at least ``least`` wide, with a margin of ``share`` at both ends."""
    low, high = min(values), max(values)
    missing = max(least - (high - low), 0.0) / 2
    margin = share * max(high - low, least)
    return low - missing - margin, high + missing + margin


def widened_log(values: Sequence[float], least: float = 1.5, share: float = 0.06) -> tuple[float, float]:
    """As ``widened`` for a logarithmic axis: ``least`` is a factor; values are above 0."""
    low, high = widened([math.log(value) for value in values], math.log(least), share)
    return math.exp(low), math.exp(high)


def frame(
    x: Scale, y: Scale, names: tuple[str, str], write: tuple[Callable[[float], str], Callable[[float], str]]
) -> str:
    """Grid, ticks and names of both axes; ``write`` spells the ticks."""
    left, right, bottom, top = x.start, x.stop, y.start, y.stop
    out = []
    for value in x.ticks():
        out += [line(x(value), bottom, x(value), top, "grid")]
        out += [words(x(value), bottom + 17, write[0](value), "soft", "middle")]
    for value in y.ticks():
        out += [line(left, y(value), right, y(value), "grid")]
        out += [words(left - 8, y(value) + 4, write[1](value), "soft", "end")]
    out += [line(left, bottom, right, bottom, "axis"), line(left, bottom, left, top, "axis")]
    out += [words((left + right) / 2, bottom + 36, names[0], "soft", "middle")]
    return "".join([*out, words(16, (bottom + top) / 2, names[1], "soft", "middle", turned=True)])


def _even_ticks(low: float, high: float, about: int) -> list[float]:
    rough = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, about: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**decade for decade in decades for f in factors if low <= f * 10.0**decade <= high]
        if len(found) <= about + 3:
            return found if len(found) > 1 else _even_ticks(low, high, about)
    every = math.ceil(len(found) / about)
    return found[::every]
