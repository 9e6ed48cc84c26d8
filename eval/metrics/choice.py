"""Scores of answers that pick something: a class, a paragraph, a number. Each divides by how many were named."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")
_PARAGRAPH_ZH = re.compile(r"段落(\d+)")


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 over the number of class names in the answer, when the right one is among them.

    A name that is part of the right one's name does not count. As in the benchmark, the name behind one taken out is
    not looked at: of two such names side by side the second one counts.
    """
    named = [name for name in classes if name in prediction]
    place = 0
    while place < len(named):
        if named[place] in reference and named[place] != reference:
            named.remove(named[place])
        place += 1
    return 1 / len(named) if reference in named else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """Share of the numbers in the answer that are the one of "Paragraph N"."""
    return _share(prediction, _PARAGRAPH, reference)


def retrieval_zh(prediction: str, reference: str) -> float:
    """Share of the numbers in the answer that are the one of "段落N"."""
    return _share(prediction, _PARAGRAPH_ZH, reference)


def count(prediction: str, reference: str) -> float:
    """Share of the numbers in the answer that are written as the reference is."""
    numbers = _NUMBER.findall(prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def _share(prediction: str, pattern: re.Pattern[str], reference: str) -> float:
    found = pattern.search(reference)
    if found is None:
        raise ValueError(f"the reference {reference!r} names no paragraph")
    return count(prediction, found.group(1))
