"""Needs: what a profile reads of an artifact, and what an artifact holds, in the same words.

Of window rows there are four kinds. A profile asks for one of the first two; what it asks for can be stored in others:

    window_all              every row of every layer
    window_tail             the last w rows of the document
    window_checkpoints:K    w rows of every layer at every K-th block boundary; the last w rows of any end are computed
    window_none             no row; the last w rows of any end are computed

The last two serve ``window_tail``, and the end of a part of the document too. They are needs of their own, so that
what a certificate binds is what the files hold, and another strategy is another artifact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from redknot.errors import ConfigError

WINDOW_ALL, WINDOW_TAIL = "window_all", "window_tail"
_CHECKPOINTS = re.compile(r"window_checkpoints:([1-9][0-9]{0,5})")
_STRATEGY = re.compile(r"all|none|checkpoints:([1-9][0-9]{0,5})")
_NO_CHECKPOINT = 10**6  # blocks; more than any K


class WindowKind(StrEnum):
    """How window rows are kept."""

    ALL = "all"
    TAIL = "tail"
    CHECKPOINTS = "checkpoints"
    NONE = "none"


@dataclass(frozen=True)
class Windows:
    """What an artifact keeps of a document's window rows."""

    kind: WindowKind
    every: int = 0  # blocks from one checkpoint to the next, of CHECKPOINTS

    @property
    def rebuilt(self) -> bool:
        """Whether the rows that a profile reads may have to be computed again."""
        return self.kind in (WindowKind.CHECKPOINTS, WindowKind.NONE)

    @property
    def serve_parts(self) -> bool:
        """Whether the rows in front of any block boundary can be had, and not only those of the document's end."""
        return self.kind is not WindowKind.TAIL

    @property
    def need(self) -> str:
        """The word for it among the needs."""
        return f"window_{self}"

    @property
    def rank(self) -> int:
        """Of several artifacts of a document the lowest is used: those that serve parts, then the least to compute."""
        ranks = {WindowKind.ALL: 0, WindowKind.NONE: _NO_CHECKPOINT, WindowKind.TAIL: _NO_CHECKPOINT + 1}
        return ranks.get(self.kind, self.every)

    def __str__(self) -> str:
        """The form of ``--windows``, and "tail"."""
        return f"{self.kind}:{self.every}" if self.every else str(self.kind)

    def describe(self, block: int, window: int) -> str:
        """One clause for people; ``block`` and ``window`` are lengths in tokens."""
        if self.kind is WindowKind.CHECKPOINTS:
            return f"{window} rows every {self.every * block} tokens ({self}); what else is read is recomputed"
        if self.kind is WindowKind.NONE:
            return f"{self}; what is read is recomputed"
        return "all rows" if self.kind is WindowKind.ALL else f"the last {window} rows of a document"


def parse_strategy(text: str) -> Windows:
    """A build's choice, ``all``, ``checkpoints:K`` or ``none``; ConfigError for anything else.

    ``all`` leaves to the profiles how many rows that are.
    """
    match = _STRATEGY.fullmatch(text)
    if match is None:
        raise ConfigError(f"windows {text[:40]!r}: it must be all, none or checkpoints:K, K blocks from 1 on")
    if match.group(1):
        return Windows(WindowKind.CHECKPOINTS, int(match.group(1)))
    return Windows(WindowKind(text))


def stored_windows(needs: Iterable[str]) -> Windows:
    """What an artifact with these needs keeps: the tail where they do not say."""
    found = [Windows(WindowKind.TAIL)]
    for need in needs:
        if need == WINDOW_ALL:
            found.append(Windows(WindowKind.ALL))
        elif need == "window_none":
            found.append(Windows(WindowKind.NONE))
        elif match := _CHECKPOINTS.fullmatch(need):
            found.append(Windows(WindowKind.CHECKPOINTS, int(match.group(1))))
    return min(found, key=lambda windows: windows.rank)


def lacking(wanted: Iterable[str], held: Iterable[str]) -> tuple[str, ...]:
    """The needs of a profile that an artifact does not serve, sorted."""
    there = set(held)
    missing = set(wanted) - there
    if stored_windows(there).rebuilt:
        missing.discard(WINDOW_TAIL)
    return tuple(sorted(missing))


@dataclass(frozen=True)
class Needs:
    """Needs, read."""

    latents: bool
    windows: Windows
    stream_fence: int | None  # fence layers at whose entry the residual streams are kept
    split: tuple[int, str] | None  # of Z_L: fence layers, and the name of the head table (``HeadTable.name``)


def parse_needs(needs: tuple[str, ...]) -> Needs:
    """Read the strings that a profile states and a certificate binds."""
    streams, split = None, None
    for need in needs:
        kind, _, rest = need.partition(":")
        if kind == "streams":
            streams = int(rest)
        elif kind == "zl":
            fence, _, table = rest.partition(":")
            split = (int(fence), table)
    return Needs("latents" in needs, stored_windows(needs), streams, split)
