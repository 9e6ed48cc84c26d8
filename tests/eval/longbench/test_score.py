"""Scores of answers, sets and lengths, by hand."""

from __future__ import annotations

import pytest

from eval.longbench.rows import Row
from eval.longbench.score import bucket, bucket_scores, score, set_score
from eval.longbench.tasks import task


def row(name: str, *answers: str, classes: tuple[str, ...] = ()) -> Row:
    return Row(task(name), "0", "en", "", "c", answers, classes, 1, "f:1")


def test_the_best_of_all_references_counts():
    assert score(row("hotpotqa", "Rome", "Paris, France", "Paris"), "The Paris") == 1.0
    assert score(row("hotpotqa", "Rome"), "Paris") == 0.0


@pytest.mark.parametrize(
    ("name", "scored"),
    [("triviaqa", 1.0), ("hotpotqa", 0.5)],  # first line alone, or "Paris" of three words
)
def test_the_first_line_alone_is_scored_in_some_sets(name, scored):
    assert score(row(name, "Paris"), "\n\nParis\nQuestion: next") == scored


def test_only_line_breaks_in_front_are_passed_over():
    assert score(row("triviaqa", "Paris"), " \nParis") == 0.0


def test_every_metric_is_reached_through_its_set():
    assert score(row("multifieldqa_zh", "厦门大学。"), "厦门大学") == 1.0
    assert score(row("samsum", "a b"), "a b\nDialogue: c") == pytest.approx(1.0)
    assert score(row("dureader", "厦门大学"), "厦门大学") == pytest.approx(1.0)
    assert score(row("trec", "A", classes=("A", "B")), "A B\nC") == 0.5
    assert score(row("passage_retrieval_en", "Paragraph 3"), "Paragraph 3") == 1.0
    assert score(row("passage_retrieval_zh", "段落3"), "段落3") == 1.0
    assert score(row("passage_count", "7"), "7 or 8") == 0.5
    assert score(row("lcc", "return x"), "return x\n") == 1.0


def test_two_decimals_at_the_end_and_not_before():
    assert set_score([1.0, 0.0, 0.0]) == 33.33
    assert set_score([2 / 3] * 3) == 66.67
    assert set_score([0.00004, 0.00004]) == 0.0
    with pytest.raises(ValueError, match="without rows"):
        set_score([])


def test_buckets_of_longbench_e():
    assert [bucket(n) for n in (0, 3999, 4000, 7999, 8000, 90000)] == ["0-4k"] * 2 + ["4-8k"] * 2 + ["8k+"] * 2
    assert bucket_scores([(10, 1.0), (3999, 0.0), (3999, 0.0), (8000, 2 / 3)]) == {
        "0-4k": 33.33,
        "4-8k": None,
        "8k+": 66.67,
    }
