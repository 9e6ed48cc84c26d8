"""The next line of code, by hand."""

from __future__ import annotations

import pytest

from eval.metrics.code import code_similarity


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("return x", "return x", 1.0),
        ("\n\nreturn x\nmore", "return x", 1.0),  # the first line
        ("```python\n# comment\n// other\nreturn x", "return x", 1.0),  # that holds no comment and no fence
        ("return x  # why", "return x", 0.0),  # a comment anywhere in it: no line is left
        (" \nreturn x", "return x", 0.22),  # a line of one space is a line: 2 * 1 / 9
        ("abcd", "bcde", 0.75),  # 2 * 3 / 8
        ("abc", "abd", 0.67),  # 2 * 2 / 6, in whole percent
        ("", "return x", 0.0),
        ("# all comments", "", 1.0),  # two empty lines are the same
        # "tide" and "diet": difflib takes one block and gets 2 * 1 / 8; insertions and deletions alone make 2 * 2 / 8.
        ("tide", "diet", 0.25),
        ("diet", "tide", 0.5),  # and it is not symmetric
    ],
)
def test_similarity(prediction, reference, score):
    assert code_similarity(prediction, reference) == score
