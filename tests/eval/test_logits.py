"""Divergence of first tokens."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from eval.logits import divergence, same_first

LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=4, max_size=4).map(torch.tensor)


def test_of_two_coins():
    fair, loaded = torch.tensor([0.0, 0.0]), torch.tensor([math.log(3), 0.0])
    assert math.isclose(divergence(fair, loaded), 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), rel_tol=1e-6)
    assert not same_first(torch.tensor([0.0, 1.0]), loaded)


@given(LOGITS, LOGITS, st.floats(-5, 5))
def test_it_is_never_negative_and_blind_to_a_shift(one, other, shift):
    assert divergence(one, other) >= 0
    assert divergence(one, one + shift) < 1e-6
    assert same_first(one, one)
