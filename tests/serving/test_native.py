"""Beside a native model: who runs which rows, and when native pages may hold what was reused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redknot.errors import ConfigError
from redknot.latents.segment import Segment
from redknot.serving.native import (
    Route,
    fits_beside,
    native_counters,
    off_grid,
    require_grid,
    route,
    split_pages,
)


@given(st.lists(st.booleans(), max_size=6))
def test_a_batch_is_native_ours_or_both(flags):
    wanted = Route.MIXED if True in flags and False in flags else Route.OURS if True in flags else Route.NATIVE
    assert route(flags) is wanted


@given(st.booleans(), st.lists(st.booleans(), max_size=4))
def test_batches_of_prefills_that_were_put_together_are_never_mixed(first, rest):
    chosen = [first]
    for flag in rest:
        if fits_beside(flag, chosen):
            chosen.append(flag)
    assert route(chosen) is not Route.MIXED
    assert fits_beside(first, [])


@dataclass
class Placed:
    start: int
    first: int
    stop: int


GRIDS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=5)


@given(GRIDS, st.integers(0, 127), st.integers(0, 4), st.sampled_from(["start", "first", "stop"]), st.integers(1, 127))
def test_every_edge_off_the_grid_is_found(runs, tail, number, edge, shift):
    """On the grid all is well, whatever the last one ends in; one edge that is moved is named with its segment."""
    segments, at = [], 0
    for start, blocks in runs:
        segments.append(Placed(start * 128, at, at + blocks * 128))
        at = segments[-1].stop
    segments[-1].stop += tail
    assert off_grid(segments, 128) == ""
    number %= len(segments)
    moved = segments[number]
    setattr(moved, edge, getattr(moved, edge) + shift)
    last = number == len(segments) - 1
    if edge == "stop" and last:
        assert off_grid(segments, 128) == ""
    else:
        assert off_grid(segments, 128).startswith(f"segment {number} at tokens {moved.first} to {moved.stop} ")


def test_the_segments_of_a_request_are_what_is_looked_at():
    document = Segment(offset=256, start=128, end=384, closed=True)
    head, tail = Segment(0, 0, 384, closed=True), Segment(640, 0, 10, closed=False)
    assert off_grid([head, document, tail], 128) == ""
    assert "does not follow" in off_grid([document], 128)
    assert "does not end on the grid of 128 tokens" in off_grid([Segment(0, 0, 100, closed=True), tail], 128)
    assert off_grid([], 128) == ""


def test_a_refusal_is_counted():
    counters = native_counters()
    require_grid([Placed(0, 0, 100)], 128, counters)
    with pytest.raises(
        ConfigError, match=r"^native pages are not filled: segment 0 at tokens 0 to 100 of a frame's token"
    ):
        require_grid([Placed(1, 0, 100)], 128, counters)
    assert counters["rewrites_refused"] == 1


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=9), st.sampled_from([1, 2, 4]))
def test_pages_of_the_server_are_parts_of_ours(pages, parts):
    """A slot of the server's, counted in pages of ours, is one of its page's parts; they come in order."""
    size = 256 // parts
    slots = [slot for page in pages for slot in range(256 * page, 256 * page + 256, size)]
    assert split_pages(pages, parts) == [slot // size for slot in slots]
