"""Curves of several arms over one quantity, each labelled at its right end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eval.report.charts.axes import Scale, frame, widened, widened_log
from eval.report.charts.svg import SERIES, Picture, circle, line, path, short, words

WIDTH, HEIGHT = 820, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 190, 20, 56
_APART = 15  # pixels between labels
_SMALLEST = 1e-30  # what is below is nothing to a logarithmic axis


@dataclass(frozen=True)
class Axis:
    """What an axis shows, how its ticks are written, and whether it is logarithmic."""

    name: str
    write: Callable[[float], str]
    log: bool = False


def lines(curves: Mapping[str, Sequence[tuple[float, float]]], x_axis: Axis, y_axis: Axis, title: str) -> Picture:
    """The plot of at least one curve of at least one point; what a logarithmic axis cannot show lies on its edge."""
    x = _scale([at for curve in curves.values() for at, _ in curve], x_axis, _LEFT, WIDTH - _RIGHT)
    y = _scale([value for curve in curves.values() for _, value in curve], y_axis, HEIGHT - _BOTTOM, _TOP)
    out = [frame(x, y, (x_axis.name, y_axis.name), (x_axis.write, y_axis.write))]
    ends = []
    for number, (name, curve) in enumerate(curves.items()):
        of = number % SERIES
        spots = [(x(at), y(value)) for at, value in sorted(curve)]
        dashes = ' stroke-dasharray="6 3"' if number >= SERIES else ""
        out.append(path(spots, f"series line{of}").replace("/>", f"{dashes}/>"))
        out += [
            circle(x(at), y(value), 3, f"fill{of}", f"{name}: {y_axis.write(value)} at {x_axis.write(at)}")
            for at, value in curve
        ]
        ends.append((spots[-1], short(name, 24), of))
    return Picture(WIDTH, HEIGHT, title, "".join([*out, *_labels(ends)]))


def _scale(values: Sequence[float], axis: Axis, start: float, stop: float) -> Scale:
    if axis.log:
        above = [value for value in values if value > _SMALLEST] or [1.0]
        return Scale(*widened_log(above), start, stop, log=True)
    return Scale(*widened(values, least=max(abs(max(values)), 1e-9) * 0.1, share=0.04), start, stop)


def _labels(ends: Sequence[tuple[tuple[float, float], str, int]]) -> list[str]:
    """Names beside the last points, moved apart up and down."""
    order = sorted(range(len(ends)), key=lambda i: (ends[i][0][1], i))
    tops = [ends[i][0][1] for i in order]
    for at in range(1, len(tops)):
        tops[at] = max(tops[at], tops[at - 1] + _APART)
    over = max(tops[-1] - (HEIGHT - _BOTTOM), 0)
    tops = [top - over for top in tops]
    for at in range(len(tops) - 2, -1, -1):
        tops[at] = min(tops[at], tops[at + 1] - _APART)
    out = []
    for i, top in zip(order, tops, strict=True):
        (x, y), name, of = ends[i]
        out.append(line(x + 5, y, WIDTH - _RIGHT + 14, top, "leader"))
        out.append(words(WIDTH - _RIGHT + 18, top + 4, name, f"text{of}"))
    return out
