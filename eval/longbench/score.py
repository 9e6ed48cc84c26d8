"""LongBench's scores: of one answer, of a set, and of LongBench-E's three lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from eval.longbench.rows import Row
from eval.metrics.choice import classification, count, retrieval, retrieval_zh
from eval.metrics.code import code_similarity
from eval.metrics.f1 import qa_f1, qa_f1_zh
from eval.metrics.rouge import rouge_l, rouge_l_zh

METRICS: Mapping[str, Callable[[str, str, Sequence[str]], float]] = MappingProxyType(
    {
        "qa_f1": lambda prediction, reference, classes: qa_f1(prediction, reference),
        "qa_f1_zh": lambda prediction, reference, classes: qa_f1_zh(prediction, reference),
        "rouge_l": lambda prediction, reference, classes: rouge_l(prediction, reference),
        "rouge_l_zh": lambda prediction, reference, classes: rouge_l_zh(prediction, reference),
        "classification": classification,
        "retrieval": lambda prediction, reference, classes: retrieval(prediction, reference),
        "retrieval_zh": lambda prediction, reference, classes: retrieval_zh(prediction, reference),
        "count": lambda prediction, reference, classes: count(prediction, reference),
        "code_similarity": lambda prediction, reference, classes: code_similarity(prediction, reference),
    }
)
BUCKETS = ("0-4k", "4-8k", "8k+")  # LongBench-E, by a row's own length


def scored_text(row: Row, prediction: str) -> str:
    """The part of an answer that is scored: all of it, or the first line that is not empty."""
    return prediction.lstrip("\n").split("\n")[0] if row.task.first_line else prediction


def score(row: Row, prediction: str) -> float:
    """Score of an answer between 0 and 1: the best over all references."""
    metric, text = METRICS[row.task.metric], scored_text(row, prediction)
    return max(0.0, *(metric(text, reference, row.classes) for reference in row.answers))


def set_score(scores: Sequence[float]) -> float:
    """Score of a set, between 0 and 100 with two decimals, of its rows' scores."""
    if not scores:
        raise ValueError("a set without rows has no score")
    return round(100 * sum(scores) / len(scores), 2)


def bucket(length: int) -> str:
    """The name of LongBench-E's bucket of a row's length."""
    return BUCKETS[0] if length < 4000 else BUCKETS[1] if length < 8000 else BUCKETS[2]


def bucket_scores(scored: Iterable[tuple[int, float]]) -> dict[str, float | None]:
    """LongBench-E's scores of (length, score) pairs, None for a bucket without rows."""
    found: dict[str, list[float]] = {name: [] for name in BUCKETS}
    for length, value in scored:
        found[bucket(length)].append(value)
    return {name: round(float(100 * np.mean(values)), 2) if values else None for name, values in found.items()}
