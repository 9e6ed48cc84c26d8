"""The nano text generator: ids equal the tokenizer's, splits are disjoint, answers are what the documents say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redknot.nano import names, sequences, text
from redknot.nano.sequences import Recipe, induction_sequence, keyvalue_sequence, training_sequence
from redknot.nano.tokenizer import BOS_ID, EOS_ID, FIRST_WORD_ID, build_tokenizer

FACT = re.compile(r"The (\w+) of (\w+ \w+) is (\w+ \d+)\.")
TOKENIZER = build_tokenizer()


def stated(document: str) -> dict[tuple[str, str], str]:
    return {(relation, name): value for relation, name, value in FACT.findall(document)}


def asked(question: str) -> tuple[str, str]:
    found = re.search(r"What is the (\w+) of (\w+ \w+)\?", question)
    assert found
    return found[1], found[2]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), n_facts=st.integers(0, 6), extra=st.integers(0, 300))
def test_document_ids_are_the_tokenizers_and_length_is_exact(seed: int, n_facts: int, extra: int) -> None:
    rng = np.random.default_rng(seed)
    n_tokens = text.min_document_tokens(n_facts) + extra
    facts = text.draw_facts(rng, "train", n_facts)
    ids, starts = text.document_ids(rng, text.lexicon(TOKENIZER), n_tokens, facts)
    document = text.lexicon(TOKENIZER).text(ids)
    assert TOKENIZER.encode(document, add_special_tokens=False).ids == ids
    assert len(ids) == n_tokens
    assert list(stated(document)) == [(fact.relation, fact.name) for fact in facts]
    for start, fact in zip(starts, facts, strict=True):
        assert TOKENIZER.decode(ids[start : start + text.FACT_TOKENS]) == (
            f" The {fact.relation} of {fact.name} is {' '.join(fact.value)}."
        )
    assert all(b - a >= text.FACT_TOKENS + text.FILLER_MIN for a, b in pairwise(starts))


def test_document_too_short_for_its_facts_is_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="2 facts need 46 tokens"):
        text.make_document(rng, TOKENIZER, 45, text.draw_facts(rng, "train", 2))


def test_splits_are_disjoint_and_share_every_syllable() -> None:
    for part in (names.first_names, names.last_names, names.values):
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


@pytest.mark.parametrize("task", sorted(text.TASKS))
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(("n_tokens", "n_documents"), [(256, 2), (1024, 4), (2048, 8), (1500, 5)])
def test_samples_have_the_length_asked_for_and_the_right_answer(
    task: str, split: names.Split, n_tokens: int, n_documents: int
) -> None:
    rng = np.random.default_rng(n_tokens)
    sample = text.make_sample(rng, TOKENIZER, task, split, n_tokens, n_documents)
    bos, *documents, question, answer = text.sample_ids(TOKENIZER, sample)
    assert bos == [BOS_ID]
    assert len(documents) == n_documents
    assert sum(map(len, (bos, *documents, question))) == n_tokens
    assert (len(question), len(answer)) == (text.QUESTION_TOKENS, text.ANSWER_TOKENS)
    assert sample.question.endswith(" is")
    values = [
        facts[asked(sample.question)] for facts in map(stated, sample.documents) if asked(sample.question) in facts
    ]
    assert len(values) == {"single": 1, "latest": 2}[task]
    assert sample.answer == f" {values[-1]}."
    assert len(set(values)) == len(values)
    known = {f"{word} {number}" for word, number in names.values(split)}
    assert all(value in known for document in sample.documents for value in stated(document).values())


def test_swapping_the_documents_of_latest_swaps_the_answer() -> None:
    sample = text.make_sample(np.random.default_rng(3), TOKENIZER, "latest", "test", 600, 4)
    swapped = text.swap_latest(sample)
    key = asked(sample.question)
    values = [facts[key] for facts in map(stated, swapped.documents) if key in facts]
    assert swapped.answer == f" {values[-1]}." != sample.answer
    assert text.swap_latest(swapped) == sample


def test_samples_are_a_function_of_the_seed() -> None:
    first, again = (text.make_sample(np.random.default_rng(5), TOKENIZER, "single", "test", 512, 4) for _ in range(2))
    assert first == again


def test_facts_are_spread_over_documents_within_capacity() -> None:
    rng = np.random.default_rng(0)
    for n_documents, capacity in [(2, 1), (3, 3), (8, 2), (5, 1)]:
        for n_pairs in range(n_documents * capacity // 2 + 1):
            facts = text.draw_facts(rng, "train", n_documents * capacity - n_pairs)
            pairs = [(text.restate(rng, "train", fact), fact) for fact in facts[:n_pairs]]
            placed = text.place_facts(rng, n_documents, capacity, facts[n_pairs:], pairs)
            assert [len(part) for part in placed] == [capacity] * n_documents
            for old, new in pairs:
                where = {fact: index for index, part in enumerate(placed) for fact in part}
                assert where[old] < where[new]


RECIPES = [
    (192, Recipe(n_documents=1, facts_per_document=2, n_questions=4)),
    (640, Recipe(n_documents=3, facts_per_document=3, latest_share=1.0)),
    (1024, Recipe(n_documents=4, facts_per_document=5, n_questions=12, latest_share=0.4, sibling_share=0.3)),
    (2048, Recipe(n_documents=8, facts_per_document=2, n_questions=20, min_distance=256, other_weight=0.1)),
]


@pytest.mark.parametrize(("n_tokens", "recipe"), RECIPES)
def test_training_sequences_ask_what_the_documents_say(n_tokens: int, recipe: Recipe) -> None:
    for seed in range(5):
        ids, weights = training_sequence(np.random.default_rng(seed), TOKENIZER, n_tokens, recipe)
        assert ids.shape == weights.shape == (n_tokens,)
        assert ids[0] == BOS_ID
        written = TOKENIZER.decode(ids[1:].tolist(), skip_special_tokens=False)
        documents, *rounds = written.split("\n\nQuestion: ", 1)[0], *written.split("\nQuestion: ")[1:]
        latest = stated(documents)
        assert len(rounds) == recipe.n_questions
        for part in rounds:
            relation, name, value = FACT.findall(part)[0]
            assert latest[relation, name] == value
        first_asked = list(dict.fromkeys(FACT.findall(part)[0] for part in rounds))
        weighed = np.flatnonzero(weights == 1.0).reshape(-1, text.ANSWER_TOKENS)
        for start, (_, _, value) in zip(weighed, first_asked, strict=True):
            assert TOKENIZER.decode(ids[start].tolist()) == f" {value}."
            assert ids[start[-1] + 1] == EOS_ID
        assert np.isin(weights, np.float32([recipe.other_weight, 1.0])).all()


def test_questions_keep_the_minimal_distance_and_repeat() -> None:
    recipe = Recipe(n_documents=4, facts_per_document=2, n_questions=24, min_distance=300)
    ids, weights = training_sequence(np.random.default_rng(1), TOKENIZER, 1280, recipe)
    n_documents_tokens = 1280 - recipe.n_questions * sequences.ROUND_TOKENS
    answers = np.flatnonzero(ids == EOS_ID) - text.ANSWER_TOKENS
    assert len(answers) == recipe.n_questions
    counts: Counter[tuple[int, ...]] = Counter()
    for answer in answers:
        key = ids[answer - 7 : answer]
        windows = np.lib.stride_tricks.sliding_window_view(ids[:n_documents_tokens], 7)
        start = int(np.flatnonzero((windows == key).all(axis=1))[-1])
        assert answer - text.QUESTION_TOKENS - start >= recipe.min_distance
        counts[tuple(key.tolist())] += 1
    assert max(counts.values()) > 1
    assert (weights == 1.0).sum() == len(counts) * text.ANSWER_TOKENS  # an answer given again does not train


def test_impossible_recipes_are_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="need 320 tokens"):
        training_sequence(rng, TOKENIZER, 400, Recipe(n_questions=8))
    with pytest.raises(ValueError, match="no fact is 4000"):
        training_sequence(rng, TOKENIZER, 1024, Recipe(min_distance=4000))


def test_induction_weights_lie_on_repeats() -> None:
    ids, weights = induction_sequence(np.random.default_rng(0), 2048, 2048, other_weight=0.05)
    assert ids.shape == weights.shape == (2048,)
    assert ids.min() >= FIRST_WORD_ID
    assert ids.max() < 2048
    scored = np.flatnonzero(weights == 1.0)
    assert 0.2 < scored.size / 2048 < 0.6
    trigrams = np.lib.stride_tricks.sliding_window_view(ids, 4)
    for at in scored:
        earlier = trigrams[: at - 3]
        assert (earlier == trigrams[at - 3]).all(axis=1).any()


def test_keyvalue_queries_repeat_distant_facts() -> None:
    ids, weights = keyvalue_sequence(np.random.default_rng(0), 2048, 1024, 40, 30, min_distance=128)
    answers = np.flatnonzero(weights == 1.0).reshape(30, 2)[:, 0]
    windows = np.lib.stride_tricks.sliding_window_view(ids, 4)
    for answer in answers:
        matches = np.flatnonzero((windows[: 1024 - 240] == ids[answer - 2 : answer + 2]).all(axis=1))
        assert matches.size == 1
        assert answer - 2 - matches[0] >= 128
    with pytest.raises(ValueError, match="do not fit"):
        keyvalue_sequence(np.random.default_rng(0), 2048, 256, 40, 30)


@pytest.mark.parametrize(
    "make",
    [
        lambda rng: training_sequence(rng, TOKENIZER, 1024),
        lambda rng: induction_sequence(rng, 2048, 1024),
        lambda rng: keyvalue_sequence(rng, 2048, 1024, 40, 30),
    ],
)
def test_sequences_are_a_function_of_the_seed(
    make: Callable[[np.random.Generator], tuple[sequences.Ids, sequences.Weights]],
) -> None:
    (ids, weights), (ids_again, weights_again) = make(np.random.default_rng(9)), make(np.random.default_rng(9))
    assert (ids == ids_again).all()
    assert (weights == weights_again).all()


@given(st.integers(2, 8), st.integers(1, 4), st.integers(0, 1000), st.sampled_from([0.0, 0.5, 1.0]))
def test_pairs_fit_however_many_are_neighbours(n_documents: int, capacity: int, seed: int, near: float) -> None:
    """No document above its capacity, the later statement in a later document, neighbours where wanted and possible."""
    rng = np.random.default_rng(seed)
    n_pairs = n_documents * capacity // 2
    facts = text.draw_facts(rng, "train", n_pairs)
    pairs = [(text.restate(rng, "train", fact), fact) for fact in facts]
    placed = text.place_facts(rng, n_documents, capacity, [], pairs, near)
    assert max(len(document) for document in placed) <= capacity
    where = {fact: index for index, document in enumerate(placed) for fact in document}
    gaps = [where[later] - where[earlier] for earlier, later in pairs]
    assert all(gap >= 1 for gap in gaps)
    if near == 1.0 and gaps:
        assert gaps[0] == 1 or n_pairs * 2 == n_documents * capacity
