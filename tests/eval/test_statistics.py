"""Intervals: known values, what must not change them, and how often they hold what they estimate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.statistics import DRAWS, Interval, averaged, clustered_mean, clustered_quantile, drawn_mean, quantile, ratio

VALUES = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40)
TIMES = st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=20)


def clusters_of(count: int, each: int) -> list[str]:
    return [str(number // each) for number in range(count)]


@given(VALUES, st.integers(1, 5))
def test_a_mean_and_its_bounds(values: list[float], each: int) -> None:
    found = clustered_mean(values, clusters_of(len(values), each))
    assert found.value == pytest.approx(np.mean(values))
    assert found.n == len(values)
    if len(values) <= each:
        assert (found.low, found.high) == (None, None)
    else:
        assert found.low is not None
        assert found.high is not None
        slack = 1e-3 * max(map(abs, values)) + 1e-12  # draws are added up in single precision
        assert min(values) - slack <= found.low <= found.high <= max(values) + slack


@given(VALUES, st.floats(-100, 100), st.floats(0.01, 100))
def test_an_interval_moves_and_grows_with_its_values(values: list[float], shift: float, factor: float) -> None:
    of = clusters_of(len(values), 2)
    first, second = clustered_mean(values, of), clustered_mean([factor * v + shift for v in values], of)
    if first.low is None or first.high is None:
        assert second.low is None
        return
    scale = factor * max(map(abs, values)) + abs(shift)
    assert second.low == pytest.approx(factor * first.low + shift, abs=1e-4 * scale + 1e-9)
    assert second.high == pytest.approx(factor * first.high + shift, abs=1e-4 * scale + 1e-9)


def test_the_spread_is_the_standard_error() -> None:
    values = np.random.default_rng(3).normal(5, 2, 400)
    drawn = drawn_mean(values, clusters_of(400, 1))
    assert drawn.draws is not None
    assert len(drawn.draws) == DRAWS
    assert np.std(drawn.draws) == pytest.approx(np.std(values) / 20, rel=0.06)


def test_equal_answers_within_a_context_tell_as_much_as_one() -> None:
    """Five copies of a context's value: the interval stays that of the contexts, not of five times as many items."""
    values = np.random.default_rng(4).normal(0, 1, 80)
    once = clustered_mean(values, clusters_of(80, 1))
    copied = clustered_mean(np.repeat(values, 5), [name for name in clusters_of(80, 1) for _ in range(5)])
    assert (copied.low, copied.high) == pytest.approx((once.low, once.high), abs=1e-6)
    apart = clustered_mean(np.repeat(values, 5), clusters_of(400, 1))
    assert copied.low is not None
    assert apart.low is not None
    assert apart.value - apart.low < 0.6 * (copied.value - copied.low)


def test_unequal_contexts_are_resampled_with_all_of_their_items() -> None:
    """Draws of one context of three and one of one: a mean is one of three values, with the odds of 1 : 2 : 1."""
    drawn = drawn_mean([1, 1, 1, 0], ["a", "a", "a", "b"])
    assert drawn.draws is not None
    shares = {value: float(np.mean(np.isclose(drawn.draws, value))) for value in (0, 0.75, 1)}
    assert sum(shares.values()) == 1
    assert shares[0.75] == pytest.approx(0.5, abs=0.05)


def test_an_interval_holds_the_truth_in_about_95_of_100() -> None:
    rng, held = np.random.default_rng(5), 0
    for _ in range(400):
        contexts = rng.normal(0, 1, 60)
        found = clustered_mean(np.repeat(contexts, 3) + rng.normal(0, 1, 180), clusters_of(180, 3))
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0 <= found.high
    assert 0.90 <= held / 400 <= 0.98


def test_equal_input_gives_equal_figures() -> None:
    values, of = np.random.default_rng(6).random(50), clusters_of(50, 5)
    assert clustered_mean(values, of) == clustered_mean(values.copy(), list(of))
    assert clustered_quantile(values, of, 0.95) == clustered_quantile(values, of, 0.95)
    assert ratio(values, values[::-1]) == ratio(values, values[::-1])


def test_items_that_all_agree_leave_room_for_what_they_did_not_show() -> None:
    same = drawn_mean([1.0] * 50, clusters_of(50, 5))
    assert (same.interval().low, same.interval().high) == (1.0, 1.0)
    found = same.interval((0.0, 1.0))
    assert (found.low, found.high) == (pytest.approx(0.929, abs=5e-4), 1.0)
    none = drawn_mean([0.0] * 50, clusters_of(50, 5)).interval((-1.0, 1.0))
    assert (none.low, none.high) == (pytest.approx(-0.071, abs=5e-4), pytest.approx(0.071, abs=5e-4))
    mixed = drawn_mean([0.0, 1.0] * 25, clusters_of(50, 1))
    assert mixed.interval((0.0, 1.0)) == mixed.interval()


def test_the_mean_of_data_sets_weighs_them_the_same() -> None:
    few, many = drawn_mean([0.0, 1.0], ["a", "b"]), drawn_mean([1.0] * 98, clusters_of(98, 2))
    both = averaged([few, many])
    assert (both.value, both.n) == (0.75, 100)
    found = both.interval()
    assert (found.low, found.high) == (0.5, 1.0)
    assert averaged([few, drawn_mean([1.0], ["only"])]).interval() == Interval(0.75, None, None, 3)


def test_data_sets_are_drawn_apart_from_each_other() -> None:
    """Were they drawn together, the spread of the mean of two equal sets would be that of one."""
    values = np.random.default_rng(7).normal(0, 1, 100)
    one = drawn_mean(values, clusters_of(100, 1))
    both = averaged([one, one])
    assert one.draws is not None
    assert both.draws is not None
    assert np.std(both.draws) == pytest.approx(np.std(one.draws) / np.sqrt(2), rel=0.1)


@given(VALUES, st.sampled_from([0.5, 0.95]))
def test_a_quantile_was_measured(values: list[float], q: float) -> None:
    assert quantile(values, q) == sorted(values)[int(np.ceil(q * len(values))) - 1]


@given(VALUES, st.integers(1, 4), st.sampled_from([0.5, 0.95]))
def test_quantiles_by_cluster_lie_among_the_values(values: list[float], each: int, q: float) -> None:
    found = clustered_quantile(values, clusters_of(len(values), each), q)
    assert found.value == quantile(values, q)
    assert (found.low is None) == (len(values) <= each)
    if found.low is not None:
        assert found.high is not None
        assert min(values) <= found.low <= found.high <= max(values)


def test_quantiles_by_cluster_against_drawing_one_by_one() -> None:
    rng = np.random.default_rng(8)
    values, of = rng.exponential(1, 120), clusters_of(120, 6)
    draws = []
    for _ in range(2000):
        picked = rng.integers(0, 20, 20)
        draws.append(quantile(np.concatenate([values[6 * at : 6 * at + 6] for at in picked]), 0.95))
    found = clustered_quantile(values, of, 0.95)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(draws, (0.025, 0.975))), rel=0.1)


def test_a_ratio_is_the_median_over_pairs() -> None:
    over, under = np.array([2.0, 6.0, 3.0, 10.0]), np.array([1.0, 2.0, 1.0, 2.0])
    found = ratio(over, under)
    draws = np.median(np.random.default_rng(0).choice(over / under, size=(DRAWS, 4)), axis=1)
    assert found.value == 3.0
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(draws, (0.025, 0.975))))


@given(TIMES, st.floats(0.1, 10))
def test_a_ratio_ignores_the_speed_of_the_machine(pairs: list[tuple[float, float]], factor: float) -> None:
    """Every pair has its own machine, as it were: both times of a pair may be scaled."""
    over, under = np.array(pairs).T
    scales = np.linspace(1, factor, len(pairs))
    plain, scaled = ratio(over, under), ratio(over * scales, under * scales)
    assert scaled.value == pytest.approx(plain.value)
    assert scaled.low == pytest.approx(plain.low)
    assert scaled.high == pytest.approx(plain.high)
    assert (plain.low is None) == (len(pairs) == 1)


def test_how_an_interval_reads() -> None:
    assert f"{Interval(2.254, 2.1, 2.419):.2f}" == "2.25 [2.10, 2.42]"
    assert f"{Interval(2.254, None, None):.1f}" == "2.3"
    assert Interval(0.5, 0.25, None, 3).scaled(100) == Interval(50.0, 25.0, None, 3)
