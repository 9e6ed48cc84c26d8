"""Beside a native model of the server: which rows are whose, and when native pages may be filled with reused latents.

Where the server has kernels of its own, they run every request that reuses nothing, from pages of theirs. A request
that reuses is ours from its first row to its last: its documents are read where they are, at the positions they were
built at, also while it decodes. What is here decides; it neither runs rows nor knows the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Protocol

from redknot.errors import ConfigError
from redknot.latents.books import Counters

NATIVE_COUNTERS = (
    "rows",  # of batches that ran on the native model alone
    "rows_ours",  # that ran here
    "rows_shadowed",  # ours, that the native model ran too because others of their batch were native
    "rewrites",  # reused latents and keys that were turned and quantised once more, to lie in native pages
    "rewrites_refused",  # fills that would have needed a segment off the grid
)


def native_counters() -> Counters:
    """Counts of rows by who ran them, and of rewrites; whoever does the work increments."""
    return Counters(NATIVE_COUNTERS)


class Route(StrEnum):
    """Who runs the rows of a batch."""

    NATIVE = "native"
    OURS = "ours"
    MIXED = "mixed"  # the native model runs all, and what it says of ours is replaced


def route(flagged: Sequence[bool]) -> Route:
    """Who runs a batch whose requests are flagged, that is reuse; a batch of none is native."""
    if not any(flagged):
        return Route.NATIVE
    return Route.OURS if all(flagged) else Route.MIXED


def fits_beside(flagged: bool, chosen: Iterable[bool]) -> bool:
    """Whether a request may be prefilled in one batch with those that were chosen: only its own kind."""
    return all(one == flagged for one in chosen)


class Placed(Protocol):
    """A segment of a request (``latents/segment.py``): where it was computed, and where it stands."""

    @property
    def start(self) -> int:
        """Frame position of the first token."""

    @property
    def first(self) -> int:
        """Request position of the first token."""

    @property
    def stop(self) -> int:
        """Request position behind the last token."""


def off_grid(segments: Sequence[Placed], grid: int) -> str:
    """Why native pages cannot be filled from these segments, in words; empty where they can.

    Native groups are counted from the request's first token. Ours are counted from each segment's first token, and are
    the same only where every segment starts, in its frame and in the request, on a multiple of ``grid`` (the least
    common multiple of the ratios, 128 tokens for V4) and, but for the last, ends on one.
    """
    at = 0
    for number, segment in enumerate(segments):
        where = f"segment {number} at tokens {segment.first} to {segment.stop}"
        if segment.first != at:
            return f"{where} does not follow what ends at token {at}"
        if segment.first % grid or segment.start % grid:
            return f"{where} of a frame's token {segment.start} on does not start on the grid of {grid} tokens"
        if segment.stop % grid and number < len(segments) - 1:
            return f"{where} does not end on the grid of {grid} tokens"
        at = segment.stop
    return ""


def require_grid(segments: Sequence[Placed], grid: int, counters: Counters) -> None:
    """ConfigError, which is counted, where native pages cannot be filled from these segments."""
    reason = off_grid(segments, grid)
    if reason:
        counters["rewrites_refused"] += 1
        raise ConfigError(f"native pages are not filled: {reason}")


def split_pages(pages: Iterable[int], parts: int) -> list[int]:
    """Numbers of our pages for the server's, each of which holds ``parts`` of ours: page p is ours p * parts on."""
    return [page * parts + part for page in pages for part in range(parts)]
