"""The middle cut out: against the benchmark's own three lines, and with every border in its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.prompt import Frame
from eval.truncate import LOST, middle_out
from redknot.errors import InputError


class Bytes:
    """One token a byte, as far as a byte-level vocabulary goes in cutting characters."""

    def __init__(self, bos_id: int | None = None) -> None:
        self.bos_id = bos_id

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode("utf-8", "replace")


class Lossy(Bytes):
    """A tokenizer that loses the space in front, as SentencePiece does."""

    def decode(self, ids):
        return super().decode(ids).removeprefix(" ")


def by_the_benchmark(text: str, limit: int, codec: Bytes) -> str:
    """What its script does, BOS included and left out of the text again."""
    ids = ([] if codec.bos_id is None else [codec.bos_id]) + codec.encode(text)
    if len(ids) <= limit:
        return text
    half = int(limit / 2)
    kept = [[token for token in part if token != codec.bos_id] for part in (ids[:half], ids[-half:])]
    return codec.decode(kept[0]) + codec.decode(kept[1])


def test_by_hand():
    frame = Frame("ab", "0123456789", "yz")
    assert middle_out(frame, 14, Bytes()) is frame
    assert middle_out(frame, 13, Bytes()) == Frame("ab", "0123" + "6789", "yz")  # odd: six and six
    assert middle_out(frame, 12, Bytes()) == Frame("ab", "0123" + "6789", "yz")
    assert middle_out(frame, 4, Bytes()) == Frame("ab", "", "yz")
    assert middle_out(frame, 2, Bytes()) == Frame("a", "", "z")


def test_a_bos_takes_a_place_in_the_first_half():
    frame = Frame("ab", "0123456789", "yz")
    assert middle_out(frame, 15, Bytes(bos_id=256)) is frame
    assert middle_out(frame, 14, Bytes(bos_id=256)) == Frame("ab", "0123" + "56789", "yz")
    assert middle_out(frame, 2, Bytes(bos_id=256)) == Frame("", "", "z")


def test_what_is_around_the_context_may_be_cut_too():
    assert middle_out(Frame("abcdef", "01", "yz"), 4, Bytes()) == Frame("ab", "", "yz")
    assert middle_out(Frame("abcdef", "01", "yz"), 8, Bytes()) == Frame("abcd", "01", "yz")
    assert middle_out(Frame("ab", "01", "uvwxyz"), 8, Bytes()) == Frame("ab", "01", "wxyz")
    assert middle_out(Frame("ab", "0123", ""), 4, Bytes()) == Frame("ab", "23", "")


def test_a_character_cut_through_is_lost_on_its_side():
    frame = Frame("a", "日0123本", "z")
    assert middle_out(frame, 10, Bytes()) == Frame("a", "日03本", "z")
    cut = middle_out(Frame("a", "日本日本", "z"), 6, Bytes())
    assert cut == Frame("a", LOST + LOST * 2, "z")


@pytest.mark.parametrize("limit", [1, 0, -4])
def test_a_limit_without_two_halves_is_refused(limit):
    with pytest.raises(InputError, match="at least 2"):
        middle_out(Frame("", "ab", ""), limit, Bytes())


def test_a_tokenizer_that_does_not_give_text_back_is_refused():
    with pytest.raises(InputError, match="does not give a text back"):
        middle_out(Frame(" a", "0123456789", ""), 6, Lossy())


PARTS = st.text(st.sampled_from("ab \n{é日😀" + LOST), max_size=12)


@given(PARTS, PARTS, PARTS, st.integers(2, 60), st.booleans())
def test_the_text_is_the_benchmarks_and_the_parts_are_of_their_parts(before, context, after, limit, bos):
    codec = Bytes(bos_id=256 if bos else None)
    frame = Frame(before, context, after)
    cut = middle_out(frame, limit, codec)
    assert cut.text == by_the_benchmark(frame.text, limit, codec)
    if LOST not in cut.text:  # nothing cut through: each part is the start and the end of what it was
        for part, whole in ((cut.before, before), (cut.context, context), (cut.after, after)):
            assert any(whole.startswith(part[:n]) and whole.endswith(part[n:]) for n in range(len(part) + 1))
