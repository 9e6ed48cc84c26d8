"""RULER's scores: the share of the outputs that an answer holds, or whether it holds one of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eval.ruler.rows import Row

_CONTROL = re.compile(r"[\x00-\x1f]")


def string_match_all(prediction: str, outputs: Sequence[str]) -> float:
    """Share of the outputs that stand in the answer, in whatever case."""
    return sum(_holds(prediction, output) for output in outputs) / len(outputs)


def string_match_part(prediction: str, outputs: Sequence[str]) -> float:
    """1 when one of the outputs stands in the answer, in whatever case."""
    return float(any(_holds(prediction, output) for output in outputs))


def score(row: Row, prediction: str) -> float:
    """Score of an answer between 0 and 1, control characters read as line breaks, as the benchmark does."""
    text = _CONTROL.sub("\n", prediction.strip()).strip()
    return (string_match_all if row.kind.match_all else string_match_part)(text, row.outputs)


def set_score(scores: Sequence[float]) -> float:
    """Score of a set, between 0 and 100 with two decimals, of its rows' scores."""
    if not scores:
        raise ValueError("a set without rows has no score")
    return round(sum(scores) / len(scores) * 100, 2)


def _holds(prediction: str, output: str) -> bool:
    return output.lower() in prediction.lower()
