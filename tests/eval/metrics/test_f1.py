"""F1 over words, by hand: what counts as a word is where evaluations go wrong."""

from __future__ import annotations

import pytest

from eval.metrics.f1 import normalised, overlap_f1, qa_f1, qa_f1_zh


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The  Cat, a DOG\tand an  owl.", "cat dog and owl"),
        ("Theory of another than anthem", "theory of another than anthem"),  # whole words only
        ("A.B. the-end", "ab theend"),  # punctuation goes first and joins: "the-end" holds no article any more
        ("a.", ""),
        ("don’t “quote”", "don’t “quote”"),  # only ASCII punctuation goes
        ("", ""),
    ],
)
def test_english_is_normalised(text, words):
    assert normalised(text) == words


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("The Eiffel Tower", "eiffel tower.", 1.0),
        ("in Paris, France", "Paris", 0.5),  # precision 1/3, recall 1
        ("Paris Paris", "Paris", 2 / 3),  # a word counts as often as it is in both
        ("Paris", "Paris Paris Rome", 0.5),  # precision 1, recall 1/3
        ("Berlin", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("the", "the", 0.0),  # both empty after normalisation: no word is shared
        ("New York City", "new york", 0.8),  # precision 2/3, recall 1
    ],
)
def test_english_f1(prediction, reference, score):
    assert qa_f1(prediction, reference) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("厦门大学", "厦门大学。", 1.0),  # the full stop is a word of its own, and goes
        ("在厦门大学", "厦门大学。", 2 / 3),  # 在 | 厦门大学
        ("", "厦门大学。", 0.0),
        ("。", "。", 0.0),
        ("南京大学", "厦门大学", 0.0),  # other words, though two characters are the same
        ("ABC", "abc", 1.0),
        ("《", "《》", 1.0),  # the list has 》 and not 《
        ("A．", "A", 2 / 3),  # nor the full-width full stop
        ("A！？“”、…（）", "A", 1.0),
    ],
)
def test_chinese_f1(prediction, reference, score):
    assert qa_f1_zh(prediction, reference) == pytest.approx(score, abs=1e-12)


def test_overlap_of_nothing():
    assert overlap_f1([], []) == 0.0
