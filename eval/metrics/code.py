"""Similarity of the next line of code.

LongBench calls `fuzzywuzzy.fuzz.ratio`. As its requirements install it, that is `difflib`'s ratio in whole percent.
Where python-Levenshtein happens to be installed too, it is another number (insertions and deletions; `rapidfuzz` has
the same). Published scores are of both kinds; this is the first. See https://github.com/THUDM/LongBench/issues/96.
"""

from __future__ import annotations

from difflib import SequenceMatcher

_NOT_CODE = ("`", "#", "//")


def code_similarity(prediction: str, reference: str) -> float:
    """Similarity of the reference and the first line of an answer that holds no comment and no fence."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in _NOT_CODE)), "")
    if line == reference:
        return 1.0
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100
