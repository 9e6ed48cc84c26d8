"""Classes, paragraphs and counts, by hand."""

from __future__ import annotations

import pytest

from eval.metrics.choice import classification, count, retrieval, retrieval_zh

CLASSES = ("Abbreviation", "Expression abbreviated", "Other entity", "entity", "Other location")


@pytest.mark.parametrize(
    ("prediction", "reference", "classes", "score"),
    [
        ("Type: Abbreviation", "Abbreviation", CLASSES, 1.0),
        ("abbreviation", "Abbreviation", CLASSES, 0.0),  # case counts
        ("Abbreviation or Other location", "Abbreviation", CLASSES, 0.5),
        ("Other location", "Abbreviation", CLASSES, 0.0),
        ("", "Abbreviation", CLASSES, 0.0),
        ("Other entity", "Other entity", CLASSES, 1.0),  # "entity" is named too, but is part of the right name
        ("Other entity", "entity", CLASSES, 0.5),  # not the other way about
        ("x y xyz", "xyz", ("x", "y", "xyz"), 0.5),  # x is taken out, and y behind it is not looked at
        ("x y xyz", "xyz", ("x", "xyz", "y"), 1.0),  # with another name between the two, both are
    ],
)
def test_classification(prediction, reference, classes, score):
    assert classification(prediction, reference, classes) == score


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("Paragraph 3", 1.0),
        ("3", 1.0),  # any number will do
        ("Paragraph 13", 0.0),
        ("Paragraph 3 or Paragraph 4", 0.5),
        ("3, 3, 4", 2 / 3),
        ("Paragraph 03", 0.0),
        ("three", 0.0),
        ("", 0.0),
    ],
)
def test_retrieval(prediction, score):
    assert retrieval(prediction, "Paragraph 3") == score
    assert retrieval_zh(prediction.replace("Paragraph ", "段落"), "段落3") == score
    assert count(prediction, "3") == score


def test_a_reference_that_names_no_paragraph_is_an_error():
    with pytest.raises(ValueError, match="names no paragraph"):
        retrieval("3", "段落3")
