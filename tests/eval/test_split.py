"""Contexts as documents: nothing is lost, markers are found, pieces keep to their length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.split import by_length, documents

MARKER = r"^Passage \d+:"
TEXTS = st.text(st.sampled_from("ab .。!\n\r\t\u2028é日😀"), max_size=80) | st.lists(
    st.sampled_from(["Passage 1:\n", "\nPassage 22:", "Passage x:", "words and words. ", "一句话。", "\n\n"]),
    max_size=20,
).map("".join)


@given(TEXTS, st.sampled_from([None, MARKER]), st.integers(1, 30))
def test_the_pieces_are_the_context(text, marker, limit):
    pieces = documents(text, marker, limit, len)
    assert "".join(pieces) == text
    assert all(pieces)


@given(TEXTS, st.integers(1, 30))
def test_pieces_keep_to_their_length_and_fill_it(text, limit):
    pieces = by_length(text, limit, len)
    assert "".join(pieces) == text
    assert all(1 <= len(piece) <= limit for piece in pieces)
    if text and len(text) <= limit:
        assert pieces == (text,)


@given(TEXTS, st.integers(1, 30))
def test_a_single_character_is_never_cut(text, limit):
    pieces = by_length(text, limit, lambda piece: len(piece.encode()))
    assert "".join(pieces) == text
    assert all(len(piece.encode()) <= limit or len(piece) == 1 for piece in pieces)


def test_markers_begin_documents():
    text = "Passage 1:\nA Passage 9: inside\nPassage 2:\nB\n\nPassage 10:\nC"
    assert documents(text, MARKER, 5, len) == (
        "Passage 1:\nA Passage 9: inside\n",
        "Passage 2:\nB\n\n",
        "Passage 10:\nC",
    )


def test_what_stands_in_front_of_the_first_marker_is_a_piece_of_its_own():
    assert documents("x\nPassage 1:\nPassage 2:", MARKER, 5, len) == ("x\n", "Passage 1:\n", "Passage 2:")


@pytest.mark.parametrize("text", ["Passage 1:\n23456789", "no marker\nat all"])
def test_fewer_than_two_markers_means_by_length(text):
    assert documents(text, MARKER, 11, len) == by_length(text, 11, len)
    assert len(by_length(text, 11, len)) == 2


def test_the_best_places_are_used_first():
    assert by_length("one\ntwo\n\nthree\n", 9, len) == ("one\ntwo\n\n", "three\n")
    assert by_length("Is it. Yes it is! End", 11, len) == ("Is it. ", "Yes it is! ", "End")
    assert by_length("第一句。第二句！第三", 8, len) == ("第一句。第二句！", "第三")
    assert by_length("some words here", 7, len) == ("some ", "words ", "here")
    assert by_length("abcdefgh", 3, len) == ("ab", "cd", "ef", "gh")


def test_an_empty_context_has_no_documents():
    assert documents("", MARKER, 5, len) == ()


def test_a_piece_has_at_least_one_token():
    with pytest.raises(ValueError, match="not 0"):
        by_length("a", 0, len)
