"""Quality against time to first token: every arm with its intervals, and the line of those that none beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.report.charts.axes import Scale, frame, widened, widened_log
from eval.report.charts.svg import CHARACTER, Picture, circle, line, path, short, words
from eval.statistics import Interval

WIDTH, HEIGHT = 820, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 22, 56


@dataclass(frozen=True)
class Point:
    """One arm: how many times faster than recompute its first token is there, and its score in points."""

    name: str
    speed: Interval
    score: Interval


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in one figure without losing in the other, slowest first."""
    out: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.speed.value, -p.score.value, p.name)):
        if not out or point.score.value > out[-1].score.value:
            out.append(point)
    return out[::-1]


def pareto(points: Sequence[Point], title: str) -> Picture:
    """The plot of at least one point; up and right is better."""
    x = Scale(*widened_log([v for p in points for v in _ends(p.speed)]), _LEFT, WIDTH - _RIGHT, log=True)
    y = Scale(*widened([v for p in points for v in _ends(p.score)], least=2), HEIGHT - _BOTTOM, _TOP)
    best = frontier(points)
    names = ("times faster to the first token than recompute (hot, request)", "score, points")
    out = [frame(x, y, names, (lambda v: f"{v:g}x", lambda v: f"{v:g}"))]
    out.append(path([(x(p.speed.value), y(p.score.value)) for p in best], "frontier"))
    for point in points:
        (left, right), (low, high) = _ends(point.speed)[:2], _ends(point.score)[:2]
        out.append(line(x(left), y(point.score.value), x(right), y(point.score.value), "whisker"))
        out.append(line(x(point.speed.value), y(low), x(point.speed.value), y(high), "whisker"))
    for point in points:
        told = f"{point.name}: {point.speed:.2f}x, score {point.score:.1f}"
        out.append(circle(x(point.speed.value), y(point.score.value), 5.5, "best" if point in best else "other", told))
    spots = [(x(p.speed.value), y(p.score.value)) for p in points]
    crosses = [_cross(point, x, y) for point in points]
    for point, (at, box) in zip(points, _placed([short(p.name) for p in points], spots, crosses), strict=True):
        middle = box[1] + 9
        if abs(middle - at[1]) > 14:
            out.append(line(at[0], at[1], min(max(at[0], box[0]), box[2]), middle, "leader"))
        out.append(words(box[0], box[1] + 12, short(point.name), "strong" if point in best else ""))
    return Picture(WIDTH, HEIGHT, title, "".join(out))


def _ends(interval: Interval) -> tuple[float, float, float]:
    low = interval.value if interval.low is None else interval.low
    high = interval.value if interval.high is None else interval.high
    return low, high, interval.value


Box = tuple[float, float, float, float]  # left, top, right, bottom


def _cross(point: Point, x: Scale, y: Scale) -> list[Box]:
    """What the dot and the intervals of a point cover."""
    (left, right), (low, high) = _ends(point.speed)[:2], _ends(point.score)[:2]
    at, on = x(point.speed.value), y(point.score.value)
    return [(at - 7, on - 7, at + 7, on + 7), (x(left), on - 2, x(right), on + 2), (at - 2, y(high), at + 2, y(low))]


def _placed(
    labels: Sequence[str], spots: Sequence[tuple[float, float]], crosses: Sequence[list[Box]]
) -> list[tuple[tuple[float, float], Box]]:
    """Where each label stands: near its spot, off all crosses and other labels, inside the plot."""
    taken = [box for cross in crosses for box in cross]
    boxes: dict[int, Box] = {}
    for number in sorted(range(len(spots)), key=lambda i: (spots[i][0], spots[i][1])):
        width = CHARACTER * len(labels[number])
        options = _options(spots[number], width)
        boxes[number] = min(options, key=lambda box: (_overlap(box, taken), options.index(box)))
        taken.append(boxes[number])
    return [(spots[number], boxes[number]) for number in range(len(spots))]


def _options(spot: tuple[float, float], width: float) -> list[Box]:
    """Places for a label, the nearest first."""
    x, y = spot
    found = []
    for away in range(0, 200, 17):
        for down in (away, -away) if away else (0,):
            for left in (x + 10, x - 10 - width) if away < 17 else (x + 10, x - width / 2, x - 10 - width):
                top = y - 8 + down
                if _LEFT < left < WIDTH - 4 - width and _TOP < top < HEIGHT - _BOTTOM - 16:
                    found.append((left, top, left + width, top + 16))
    return found or [(min(x + 10, WIDTH - 4 - width), y - 8, min(x + 10 + width, WIDTH - 4), y + 8)]


def _overlap(box: Box, taken: Sequence[Box]) -> float:
    """Area shared with what is there, in whole pixels."""
    shared = 0.0
    for other in taken:
        wide = min(box[2], other[2]) - max(box[0], other[0])
        high = min(box[3], other[3]) - max(box[1], other[1])
        shared += max(wide, 0) * max(high, 0)
    return round(shared)
