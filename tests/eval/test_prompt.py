"""Templates filled, and prompts in parts."""

from __future__ import annotations

import pytest

from eval.prompt import Frame, Prompt, fill


def test_what_a_row_holds_is_never_read_as_a_template():
    frame = fill("Q: {input}\n{context}\nA {input}:", "a {input} {context}", "{context}?")
    assert frame == Frame("Q: {context}?\n", "a {input} {context}", "\nA {context}?:")
    assert frame.text == "Q: {context}?\na {input} {context}\nA {context}?:"


@pytest.mark.parametrize("template", ["no place", "{context} {context}", "{contexts}"])
def test_a_template_has_one_place_for_the_context(template):
    with pytest.raises(ValueError, match="exactly once"):
        fill(template, "c")


def test_parts_are_the_text_and_none_is_empty():
    prompt = Prompt("", ("one ", "two"), " end")
    assert prompt.parts == (("one ", True), ("two", True), (" end", False))
    assert prompt.text == "one two end"
    assert Prompt("a", (), "").parts == (("a", False),)
