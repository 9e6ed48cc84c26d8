"""Groups of bars, one group an arm: quantities side by side that are not added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eval.report.charts.axes import Scale
from eval.report.charts.svg import CHARACTER, SERIES, Picture, bar, line, short, words

WIDTH = 820
_LEFT, _RIGHT, _TOP, _THICK, _GAP = 180, 60, 52, 13, 12


def bars(kinds: Sequence[str], groups: Mapping[str, Sequence[float | None]], title: str) -> Picture:
    """Shares (1 is everything, below 0 is drawn to the left) of each kind for every arm; None has no bar."""
    known = [value for values in groups.values() for value in values if value is not None]
    x = Scale(min([0.0, *known]), max([1.0, *known]), _LEFT, WIDTH - _RIGHT)
    deep = len(kinds) * _THICK + _GAP
    bottom = _TOP + deep * len(groups)
    out = []
    for share in x.ticks(5):
        out += [line(x(share), _TOP - 6, x(share), bottom, "grid")]
        out += [words(x(share), bottom + 17, f"{100 * share:.0f} %", "soft", "middle")]
    at = float(_LEFT)
    for number, kind in enumerate(kinds):
        out += [bar(at, 14, 11, 11, f"fill{number % SERIES}"), words(at + 16, 24, kind)]
        at += 34 + CHARACTER * len(kind)
    for group, (name, values) in enumerate(groups.items()):
        top = _TOP + group * deep
        out.append(words(_LEFT - 10, top + (deep - _GAP) / 2 + 4, short(name, 24), anchor="end"))
        for number, value in enumerate(values):
            if value is not None:
                y = top + number * _THICK
                left, right = sorted((x(0), x(value)))
                told = f"{name}, {kinds[number]}: {100 * value:.1f} %"
                out.append(bar(left, y, right - left, _THICK - 2, f"fill{number % SERIES}", told))
                out.append(words(right + 4, y + _THICK - 3, f"{100 * value:.0f}", "soft"))
    out.append(line(x(0), _TOP - 6, x(0), bottom, "axis"))
    return Picture(WIDTH, bottom + 30, title, "".join(out))
