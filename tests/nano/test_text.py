"""Documents: ids equal the tokenizer's, lengths are exact, statements stand in order between filler."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redknot.nano import names, text
from redknot.nano.statements import Owner as Owned
from redknot.nano.statements import Statement, Subject, Unnamed, lexicon
from redknot.nano.tokenizer import build_tokenizer
from redknot.nano.worlds import draw_facts

TOKENIZER = build_tokenizer()
LEX = lexicon(TOKENIZER)


def statements(rng: np.random.Generator, kinds: str) -> list[Statement]:
    """One statement a letter: a fact, an owner, a subject, an unnamed value."""
    places, said = names.places("train"), []
    for kind, fact in zip(kinds, draw_facts(rng, "train", len(kinds)), strict=True):
        forms: dict[str, Statement] = {
            "f": fact,
            "o": Owned(places[rng.integers(len(places))], fact.first, fact.last),
            "s": Subject(fact.first, fact.last),
            "u": Unnamed(fact.relation, fact.value),
        }
        said.append(forms[kind])
    return said


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), kinds=st.text("fosu", max_size=6), extra=st.integers(0, 300))
def test_document_ids_are_the_tokenizers_and_length_is_exact(seed: int, kinds: str, extra: int) -> None:
    rng = np.random.default_rng(seed)
    said = statements(rng, kinds)
    n_tokens = text.min_document_tokens(LEX, said) + extra
    ids = text.document_ids(rng, LEX, n_tokens, said)
    document = LEX.text(ids)
    assert TOKENIZER.encode(document, add_special_tokens=False).ids == ids
    assert len(ids) == n_tokens
    at, gaps = 0, []
    for sentence in (LEX.text(LEX.statement(one)) for one in said):
        found = document.index(sentence, at)
        assert found > at  # filler in front of it
        gaps.append(document[at:found])
        at = found + len(sentence)
    assert bool(document[at:].strip()) == (not kinds.endswith("s"))  # and behind the last, if it is no subject
    for one, gap in zip(said, gaps, strict=True):
        if isinstance(one, Unnamed) and gap is not gaps[0]:
            assert len(TOKENIZER.encode(gap, add_special_tokens=False).ids) == text.FILLER_MIN


def test_document_too_short_for_its_facts_is_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="2 statements need 46 tokens"):
        text.make_document(rng, TOKENIZER, 45, draw_facts(rng, "train", 2))


def test_splits_are_disjoint_and_share_every_word() -> None:
    for part in (names.first_names, names.last_names, names.values, names.places):
        train, test = set(part("train")), set(part("test"))
        assert not train & test
        assert len(test) >= 500
        for position in (0, 1):
            assert {item[position] for item in test} <= {item[position] for item in train}
    assert len(names.values("test")) > 10_000


def test_word_lists_hold_no_word_twice() -> None:
    value_words, filler = set(names.VALUE_WORDS), {word for group in names.FILLER_WORDS.values() for word in group}
    lists = (names.FIRST_HEADS, names.FIRST_TAILS, names.LAST_HEADS, names.LAST_TAILS, names.VALUE_WORDS)
    assert all(len(set(words)) == len(words) for words in lists)
    assert not value_words & filler
    assert not set(names.FIRST_HEADS) & set(names.LAST_HEADS)


def test_lengths_sum_to_the_total_and_keep_their_minimum() -> None:
    rng = np.random.default_rng(0)
    lengths = text.split_tokens(rng, 500, [100, 20, 50])
    assert sum(lengths) == 500
    assert all(length >= least for length, least in zip(lengths, [100, 20, 50], strict=True))
    with pytest.raises(ValueError, match="2 documents need 101 tokens"):
        text.split_tokens(rng, 100, [100, 1])
