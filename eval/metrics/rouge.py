"""ROUGE-L as LongBench has it: the package `rouge`, whose ROUGE-L is that of summaries over *sets* of words.

It splits sentences at every full stop (also in "3.5") and counts a word once. Google's `rouge-score` stems, drops every
character outside ASCII, so all of Chinese, and counts words as often as they stand: other numbers.

One thing differs from the benchmark. The package finds a subsequence by recursion, as deep as both sentences are long
together, and past Python's limit the benchmark scores 0. A Chinese answer is one sentence, however long, and comes
there. Here the limit is raised while the package runs, so such an answer gets the score that it has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rouge import Rouge

from eval.metrics.f1 import chinese_segments

_ROUGE_L = Rouge(metrics=["rouge-l"], stats=["f"])


def rouge_l(prediction: str, reference: str) -> float:
    """F of ROUGE-L; 0 when a text has no sentence: it is empty, or full stops alone."""
    if not prediction.strip(".") or not reference.strip("."):
        return 0.0
    with _deep(len(prediction.split()) + len(reference.split())):
        scores = _ROUGE_L.get_scores([prediction], [reference], avg=True)
    return float(scores["rouge-l"]["f"])


def rouge_l_zh(prediction: str, reference: str) -> float:
    """ROUGE-L over jieba's words."""
    return rouge_l(" ".join(chinese_segments(prediction)), " ".join(chinese_segments(reference)))


@contextmanager
def _deep(frames: int) -> Iterator[None]:
    """Room for a deep recursion in Python code."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + frames)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
