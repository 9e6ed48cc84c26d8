"""Segments and sessions: visibility of entries against a naive count, ownership of positions."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from redknot.latents.segment import Segment
from redknot.latents.session import Session

RATIOS = st.sampled_from([4, 32])
LENGTHS = st.integers(0, 130)


def naive_visible(segment: Segment, position: int, ratio: int) -> int:
    """Entries whose rows are all at or before a request position; the partial one with its last row."""
    count = 0
    for group in range(-(-segment.length // ratio)):
        last = segment.first + min((group + 1) * ratio, segment.length) - 1
        whole = (group + 1) * ratio <= segment.length
        count += position >= last and (whole or segment.closed)
    return count


@given(st.integers(0, 300), st.integers(0, 2), LENGTHS, st.booleans(), RATIOS)
def test_visible_entries(offset: int, blocks: int, length: int, closed: bool, ratio: int) -> None:
    start = 32 * blocks
    segment = Segment(offset - start, start, start + length, closed)
    assert (segment.first, segment.stop, segment.length) == (offset, offset + length, length)
    positions = torch.arange(max(offset - 3, 0), offset + length + 40)
    found = segment.visible(positions, ratio)
    assert found.tolist() == [naive_visible(segment, int(p), ratio) for p in positions]
    # Every entry that will exist is seen from the end on, and nothing before the first row is.
    assert int(found.max()) == segment.entries(ratio)
    assert bool((found[1:] >= found[:-1]).all())


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_segment_of_a_position(lengths: list[int], blocks: list[int]) -> None:
    segments, owners = [], []
    for number, length in enumerate(lengths):
        start, at = 32 * blocks[number], len(owners)
        segments.append(Segment(at - start, start, start + length, closed=number < len(lengths) - 1))
        owners += [number] * length
    session = Session(segments)
    assert session.length == len(owners)
    assert session.segment_of(torch.arange(len(owners))).tolist() == owners
