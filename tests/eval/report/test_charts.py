"""Plots: every arm is in them, they are well-formed whatever the figures, and no label lies on another."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.report.charts.axes import Scale, widened, widened_log
from eval.report.charts.bars import bars
from eval.report.charts.lines import Axis, lines
from eval.report.charts.pareto import Point, frontier, pareto
from eval.report.charts.svg import Picture, short
from eval.statistics import Interval

SVG = "{http://www.w3.org/2000/svg}"
NAMES = st.text(min_size=1, max_size=30)
POSITIVE = st.floats(1e-6, 1e6)


def point(name: str, speed: float, score: float) -> Point:
    return Point(name, Interval(speed, 0.9 * speed, 1.1 * speed), Interval(score, score - 1, score + 1))


def parsed(picture: Picture) -> ElementTree.Element:
    return ElementTree.fromstring(picture.standalone())


def texts(picture: Picture) -> list[str]:
    return [element.text or "" for element in parsed(picture).iter(f"{SVG}text")]


def coordinates(picture: Picture) -> list[float]:
    names = ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height")
    return [float(e.attrib[n]) for e in parsed(picture).iter() for n in names if n in e.attrib]


def test_the_frontier() -> None:
    points = [point("a", 1, 97), point("b", 2, 95), point("c", 1.5, 94), point("d", 3, 95), point("e", 9, 10)]
    assert [p.name for p in frontier(points)] == ["a", "d", "e"]
    assert frontier([]) == []
    assert [p.name for p in frontier([point("y", 1, 1), point("x", 1, 1)])] == ["x"]


@given(st.lists(st.tuples(st.floats(0.1, 50), st.floats(0, 100)), min_size=1, max_size=12))
def test_nothing_beats_the_frontier(figures: list[tuple[float, float]]) -> None:
    points = [point(str(n), *pair) for n, pair in enumerate(figures)]
    best = frontier(points)
    for p in points:
        assert p in best or any(q.speed.value >= p.speed.value and q.score.value >= p.score.value for q in best)
    assert [p.score.value for p in best] == sorted((p.score.value for p in best), reverse=True)


def test_every_arm_is_labelled_and_labels_keep_apart() -> None:
    """The crowd that budgets make: a dozen arms within a point and a factor of two."""
    points = [point(f"rowsparse-{n:02}", 2 + 0.1 * n, 97 - 0.2 * n) for n in range(12)] + [point("recompute", 1, 98)]
    picture = pareto(points, "title")
    labels = [e for e in parsed(picture).iter(f"{SVG}text") if e.text in {p.name for p in points}]
    assert len(labels) == 13
    spots = [(float(e.attrib["x"]), float(e.attrib["y"]), len(e.text or "")) for e in labels]
    for n, (x, y, size) in enumerate(spots):
        for other_x, other_y, other_size in spots[:n]:
            apart = abs(y - other_y) >= 12 or x + 6.5 * size <= other_x or other_x + 6.5 * other_size <= x
            assert apart


@given(st.lists(st.tuples(NAMES, st.floats(1e-3, 1e4), st.floats(0, 100)), min_size=1, max_size=15))
def test_any_points_make_a_picture(figures: list[tuple[str, float, float]]) -> None:
    picture = pareto([Point(n, Interval(s, None, None), Interval(q, None, None)) for n, s, q in figures], "<&>\x00")
    found = coordinates(picture)
    assert all(map(math.isfinite, found))
    assert min(found) >= -40
    assert max(found) <= 900


@given(
    st.dictionaries(
        NAMES, st.lists(st.tuples(POSITIVE, st.floats(0, 1e6)), min_size=1, max_size=5), min_size=1, max_size=20
    )
)
def test_any_curves_make_a_picture(curves: dict[str, list[tuple[float, float]]]) -> None:
    for log in (True, False):
        picture = lines(curves, Axis("x", str, log), Axis("y", str, log), "title")
        assert all(map(math.isfinite, coordinates(picture)))
        assert {short(name, 24) for name in curves} <= set(texts(picture))


@given(st.dictionaries(NAMES, st.lists(st.none() | st.floats(-3, 1), min_size=4, max_size=4), min_size=1, max_size=20))
def test_any_shares_make_bars(groups: dict[str, list[float | None]]) -> None:
    picture = bars(("a", "b", "c", "d"), groups, "title")
    found = coordinates(picture)
    assert all(map(math.isfinite, found))
    assert min(found) >= 0
    drawn = [e for e in parsed(picture).iter(f"{SVG}rect") if e.attrib.get("class", "").startswith("fill")]
    assert len(drawn) == 4 + sum(value is not None for values in groups.values() for value in values)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9), st.floats(0.1, 10))
def test_a_scale_shows_all_values_between_its_ends(values: list[float], least: float) -> None:
    scale = Scale(*widened(values, least), 100, 500)
    assert all(100 <= scale(value) <= 500 for value in values)
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks())
    assert 2 <= len(scale.ticks()) <= 15


@given(st.lists(POSITIVE, min_size=1, max_size=9))
def test_a_logarithmic_scale_too(values: list[float]) -> None:
    scale = Scale(*widened_log(values), 400, 20, log=True)
    assert all(20 <= scale(value) <= 400 for value in values)
    assert scale(0) == 400  # what it cannot show lies on the edge
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks())
    assert 1 <= len(scale.ticks()) <= 15


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", 'a"b', "\x00\x1b[31m", "‮evil", "日本語", "a" * 500])
def test_names_cannot_break_out(name: str) -> None:
    picture = pareto([point(name, 2, 50)], name)
    assert picture.standalone().count("<script") == 0
    assert not any(ord(mark) < 32 and mark != "\n" for mark in picture.standalone())
    assert "\u202e" not in picture.standalone()
    parsed(picture)


def test_pictures_of_their_own_bring_their_colours() -> None:
    picture = pareto([point("a", 2, 50)], "t")
    assert "prefers-color-scheme:dark" in picture.standalone()
    assert "<style" not in picture.inline()
    assert "http" not in picture.inline()
