"""Sessions of several segments in frames of their own, and subsets of their rows, drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from redknot.latents.segment import Segment
from redknot.latents.session import Session

BLOCK = 32


def session_of(lengths: list[int], blocks: list[int]) -> Session:
    segments, at = [], 0
    for number, length in enumerate(lengths):
        start = BLOCK * blocks[number % len(blocks)]
        segments.append(Segment(at - start, start, start + length, closed=number < len(lengths) - 1))
        at += length
    return Session(segments)


sessions = st.builds(
    session_of,
    st.lists(st.one_of(st.integers(1, 9), st.sampled_from([31, 32, 33, 64, 70])), min_size=1, max_size=5),
    st.lists(st.integers(0, 2), min_size=1, max_size=3),
)


@st.composite
def sessions_and_rows(draw: st.DrawFn, most: int = 160) -> tuple[Session, list[int]]:
    """A session and an ascending subset of its positions: scattered ones, runs, or all."""
    session = draw(sessions)
    everything = range(session.length)
    kind = draw(st.sampled_from(["all", "runs", "scattered"]))
    if kind == "all":
        picked = list(everything)
    elif kind == "scattered":
        picked = sorted(draw(st.sets(st.sampled_from(everything), min_size=1, max_size=20)))
    else:
        found: set[int] = set()
        for _ in range(draw(st.integers(1, 3))):
            lo = draw(st.sampled_from(everything))
            found |= set(everything[lo : lo + draw(st.integers(1, 50))])
        picked = sorted(found)
    return session, picked[:most]
