"""Numbers as a reader wants them; what is not there is a dash."""

from __future__ import annotations

import math
from collections.abc import Callable

from eval.statistics import Interval

NOTHING = "–"


def spelled(interval: Interval | None, number: Callable[[float], str]) -> str:
    """The figure and, where it is known, its interval, each written by ``number``."""
    if interval is None:
        return NOTHING
    text = number(interval.value)
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{number(interval.low)}, {number(interval.high)}]"


def points(interval: Interval | None) -> str:
    """A share as points of 100."""
    return spelled(interval, lambda share: f"{100 * share:.1f}")


def change(interval: Interval | None) -> str:
    """A difference of shares as points, always with its sign."""
    return spelled(interval, signed)


def signed(share: float) -> str:
    """One difference as points, with a sign that is a minus."""
    text = f"{100 * share:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")


def times(interval: Interval | None) -> str:
    """A speed-up."""
    text = spelled(interval, lambda ratio: f"{ratio:.2f}")
    value, space, rest = text.partition(" ")
    return text if interval is None else f"{value}x{space}{rest}"


def nats(interval: Interval | None) -> str:
    """A divergence; below a thousandth with its power of ten."""
    return spelled(interval, lambda value: f"{value:.3f}" if abs(value) >= 0.0005 or value == 0 else f"{value:.0e}")


def milliseconds(seconds: float | None) -> str:
    """A time; four digits or so, whatever its size."""
    if seconds is None:
        return NOTHING
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def uses(count: float | None) -> str:
    """A number of uses that pays for building."""
    if count is None:
        return NOTHING
    return "never" if math.isinf(count) else f"{count:.1f}"


def percent(share: float | None) -> str:
    """A share in percent."""
    return NOTHING if share is None else f"{100 * share:.1f} %".replace("-", "−")


def count(number: int) -> str:
    """A whole number."""
    return f"{number:,}"


def amount(value: object) -> float:
    """A number out of somebody's report; 0 for what is none."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
