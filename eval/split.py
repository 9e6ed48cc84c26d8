"""A context as documents: by the markers it carries, or by length. Put together, the pieces are the context again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

Count = Callable[[str], int]  # tokens of a text

_LINE = re.compile(r"\n+")
_BREAKS = (re.compile(r"[.!?;]\s+|[。！？；]+\s*"), re.compile(r"\s+"))  # sentence, word: where else to cut, best first


def documents(context: str, marker: str | None, limit: int, count: Count) -> tuple[str, ...]:
    """Pieces that begin at ``marker`` (a pattern; "^" is the start of a line), however long; else of ``limit`` tokens.

    A context with fewer than two markers, as a cut may leave it, is split by length. Text in front of the first marker
    is a piece of its own.
    """
    starts = [match.start() for match in re.finditer(marker, context, re.MULTILINE)] if marker else []
    if len(starts) < 2:
        return by_length(context, limit, count)
    return tuple(_cut(context, starts))


def by_length(text: str, limit: int, count: Count) -> tuple[str, ...]:
    """Pieces of at most ``limit`` tokens, of whole lines where they fit; longer lines are cut behind sentences, words.

    Tokens are those of the parts, added up: joined they are rarely more. A single character is never cut.
    """
    if limit < 1:
        raise ValueError(f"a piece has at least one token, not {limit}")
    pieces: list[list[str]] = []
    used = 0
    for line in _cut_behind(_LINE, text):
        for unit, tokens in _units(line, limit, count):
            if not pieces or used + tokens > limit:
                pieces.append([])
                used = 0
            pieces[-1].append(unit)
            used += tokens
    return tuple("".join(piece) for piece in pieces)


def _units(text: str, limit: int, count: Count, level: int = 0) -> Iterator[tuple[str, int]]:
    """Parts of a text that each fit, cut at the best places that make them fit, with their tokens."""
    tokens = count(text)
    if tokens <= limit or len(text) == 1:
        yield text, tokens
        return
    parts = _cut_behind(_BREAKS[level], text) if level < len(_BREAKS) else _cut(text, [len(text) // 2])
    for part in parts:
        yield from _units(part, limit, count, level + 1)


def _cut_behind(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    return _cut(text, [match.end() for match in pattern.finditer(text)])


def _cut(text: str, places: list[int]) -> Iterator[str]:
    """The text between the places, none of it empty."""
    for start, end in pairwise([0, *places, len(text)]):
        if start < end:
            yield text[start:end]
