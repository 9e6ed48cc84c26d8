"""ROUGE-L of summaries over sets of words, by hand."""

from __future__ import annotations

import sys

import pytest
from rouge import Rouge

from eval.metrics.rouge import rouge_l, rouge_l_zh


def f(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall + 1e-8)


@pytest.mark.parametrize(
    ("prediction", "reference", "precision", "recall"),
    [
        ("a b c d", "a b c d", 1, 1),
        ("a c b d", "a b c d", 3 / 4, 3 / 4),
        ("a b", "a b c d", 1, 1 / 2),
        ("a a a b", "a b", 1, 1),  # a word counts once
        ("A b", "a b", 1 / 2, 1 / 2),  # case counts
        ("a b. c d", "c d. a b", 1, 1),  # each sentence finds its match anywhere
        ("a b c d", "c d a b", 2 / 4, 2 / 4),  # and one sentence keeps its order
        ("worth 3.5", "worth 3.5", 1, 1),  # split at the point, the same on both sides
    ],
)
def test_english(prediction, reference, precision, recall):
    assert rouge_l(prediction, reference) == pytest.approx(f(precision, recall), abs=1e-12)


@pytest.mark.parametrize(("prediction", "reference"), [("", "a"), ("a", ""), ("...", "a"), ("a", "."), ("", "")])
def test_no_sentence_no_score(prediction, reference):
    assert rouge_l(prediction, reference) == 0.0


def test_disjoint_words():
    assert rouge_l("a b", "c d") == 0.0


def test_chinese_words():
    assert rouge_l_zh("厦门大学", "厦门大学") == pytest.approx(f(1, 1), abs=1e-12)
    # 我 | 在 | 厦门大学 and 他 | 在 | 厦门大学
    assert rouge_l_zh("我在厦门大学", "他在厦门大学") == pytest.approx(f(2 / 3, 2 / 3), abs=1e-12)


def test_long_sentences_get_the_score_that_they_have():
    """Where the package alone gives up, and the benchmark's script would then write 0."""
    limit = sys.getrecursionlimit()
    prediction, reference = (" ".join(f"{letter}{n}" for n in range(limit // 2 + 100)) for letter in "ab")
    prediction, reference = f"same {prediction}", f"same {reference}"
    assert rouge_l(prediction, reference) == pytest.approx(f(*[1 / (limit // 2 + 101)] * 2), abs=1e-12)
    assert sys.getrecursionlimit() == limit
    with pytest.raises(RecursionError):
        Rouge(metrics=["rouge-l"]).get_scores([prediction], [reference])
