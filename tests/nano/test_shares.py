"""Intervals of shares."""

from __future__ import annotations

import pytest

from redknot.nano.shares import wilson


@pytest.mark.parametrize(
    ("right", "n", "low", "high"), [(10, 10, 0.722, 1.0), (0, 20, 0.0, 0.161), (48, 50, 0.865, 0.989)]
)
def test_wilson_intervals(right: int, n: int, low: float, high: float) -> None:
    """Published values of the interval."""
    assert wilson(right, n) == pytest.approx((low, high), abs=5e-4)
