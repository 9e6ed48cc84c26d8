"""Training sequences: they ask what the documents say, and first answers alone weigh."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from redknot.nano import sequences
from redknot.nano.sequences import Recipe, induction_sequence, keyvalue_sequence, training_sequence
from redknot.nano.tokenizer import BOS_ID, EOS_ID, FIRST_WORD_ID, build_tokenizer
from tests.nano.kit import truth

TOKENIZER = build_tokenizer()
RECIPES = [
    (192, Recipe(n_documents=1, facts_per_document=2, n_questions=4)),
    (640, Recipe(n_documents=3, facts_per_document=3, latest_share=1.0)),
    (1024, Recipe(n_documents=4, facts_per_document=5, n_questions=12, latest_share=0.4, near_share=0.5)),
    (2048, Recipe(n_documents=8, facts_per_document=2, n_questions=20, other_weight=0.1)),
    (512, Recipe(task="owner", n_documents=3, facts_per_document=2, n_questions=6)),
    (1024, Recipe(task="about", n_documents=5, facts_per_document=3, n_questions=12, task_share=0.5)),
]


@pytest.mark.parametrize(("n_tokens", "recipe"), RECIPES)
def test_training_sequences_ask_what_the_documents_say(n_tokens: int, recipe: Recipe) -> None:
    for seed in range(5):
        ids, weights = training_sequence(np.random.default_rng(seed), TOKENIZER, n_tokens, recipe)
        assert ids.shape == weights.shape == (n_tokens,)
        assert ids[0] == BOS_ID
        written = TOKENIZER.decode(ids[1:].tolist(), skip_special_tokens=False)
        documents, *rounds = written.split("\nQuestion: What is the ")
        assert len(rounds) == recipe.n_questions
        assert (ids == EOS_ID).sum() == recipe.n_questions
        first: dict[str, str] = {}
        for part in rounds:
            asked, _, rest = part.partition("?\nAnswer: The ")
            value = rest.partition(" is ")[2].removesuffix("<|eos|>")
            assert value == f"{truth(documents, asked)}."
            first.setdefault(asked, f" {value}")
        weighed = np.flatnonzero(weights == 1.0)
        answers = np.split(weighed, np.flatnonzero(np.diff(weighed) > 1) + 1)
        assert [TOKENIZER.decode(ids[answer].tolist()) for answer in answers] == list(first.values())
        assert all(ids[answer[-1] + 1] == EOS_ID for answer in answers)
        assert np.isin(weights, np.float32([recipe.other_weight, 1.0])).all()


def test_questions_of_a_task_and_others_are_mixed() -> None:
    recipe = Recipe(task="owner", n_documents=4, facts_per_document=4, n_questions=40, task_share=0.5)
    ids, _ = training_sequence(np.random.default_rng(0), TOKENIZER, 2048, recipe)
    questions = TOKENIZER.decode(ids.tolist()).split("What is the ")[1:]
    indirect = sum("of the owner of" in question for question in questions)
    assert 10 < indirect < 30


def test_no_question_comes_again_before_all_of_its_kind_did() -> None:
    recipe = Recipe(n_documents=3, facts_per_document=3, n_questions=20)
    for seed in range(3):
        ids, weights = training_sequence(np.random.default_rng(seed), TOKENIZER, 1024, recipe)
        asked = [part.partition("?")[0] for part in TOKENIZER.decode(ids.tolist()).split("What is the ")[1:]]
        assert len(set(asked[:9])) == len(set(asked[9:18])) == len(set(asked)) == 9
        assert np.flatnonzero(weights == 1.0).max() < np.flatnonzero(ids == EOS_ID)[9]


def test_impossible_recipes_are_refused() -> None:
    with pytest.raises(ValueError, match="documents need 320 tokens"):
        training_sequence(np.random.default_rng(0), TOKENIZER, 400, Recipe(n_questions=8))


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
