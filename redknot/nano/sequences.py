"""Training sequences for nano: documents with many questions, and two token-level curricula.

Each function returns ids [n_tokens] and loss weights [n_tokens]. A weight belongs to its token as the target:
`weights[i]` weighs the loss of predicting `ids[i]` from `ids[:i]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from tokenizers import Tokenizer

from redknot.nano import text
from redknot.nano.names import Split
from redknot.nano.text import ANSWER_TOKENS, QUESTION_TOKENS, Fact, Lexicon, lexicon
from redknot.nano.tokenizer import BOS_ID, EOS_ID, FIRST_WORD_ID

Ids = NDArray[np.int64]
Weights = NDArray[np.float32]

ROUND_TOKENS = QUESTION_TOKENS + ANSWER_TOKENS + 1  # question, answer, EOS


@dataclass(frozen=True)
class Recipe:
    """Composition of a training sequence.

    Attributes:
        latest_share: expected share of fact slots that belong to a key stated in two documents (the later one holds).
        sibling_share: probability that a fact repeats the previous fact's name under another relation.
        near_share: share of the keys stated twice whose documents are neighbours, where there is room.
        min_distance: tokens at least between the start of the fact asked for and the start of its question.
        other_weight: loss weight of every token outside answers.
    """

    n_documents: int = 4
    facts_per_document: int = 4
    n_questions: int = 8
    latest_share: float = 0.0
    sibling_share: float = 0.0
    near_share: float = 0.0
    min_distance: int = 0
    other_weight: float = 0.05
    split: Split = "train"


def training_sequence(
    rng: Generator, tokenizer: Tokenizer, n_tokens: int, recipe: Recipe = Recipe()
) -> tuple[Ids, Weights]:
    """BOS, documents, then questions drawn with replacement, each followed by its answer and EOS.

    The first answer to a question (value and full stop) weighs 1, everything else `recipe.other_weight`: a repeated one
    can be copied from the first.

    Raises:
        ValueError: the recipe does not fit in `n_tokens`, or no fact is `min_distance` away from the first question.
    """
    lex = lexicon(tokenizer)
    placed = _world(rng, recipe)
    shortest = text.min_document_tokens(recipe.facts_per_document)
    budget = n_tokens - 1 - recipe.n_questions * ROUND_TOKENS
    lengths = text.split_tokens(rng, budget, [shortest] * recipe.n_documents)
    ids = [BOS_ID]
    # The last statement of a key holds: later documents overwrite earlier ones.
    current: dict[tuple[str, str], tuple[int, Fact]] = {}
    for length, facts in zip(lengths, placed, strict=True):
        document, starts = text.document_ids(rng, lex, length, facts)
        for start, fact in zip(starts, facts, strict=True):
            current[fact.relation, fact.name] = (len(ids) + start, fact)
        ids += document
    weights = np.full(n_tokens, recipe.other_weight, dtype=np.float32)
    asked = _ask(rng, lex, ids, sorted(current.values()), recipe)
    for start in {fact: start for start, fact in reversed(asked)}.values():
        weights[start : start + ANSWER_TOKENS] = 1.0
    return np.asarray(ids, dtype=np.int64), weights


def _world(rng: Generator, recipe: Recipe) -> list[list[Fact]]:
    """The facts of each document."""
    slots = recipe.n_documents * recipe.facts_per_document
    n_pairs = int(rng.binomial(slots // 2, recipe.latest_share)) if recipe.n_documents > 1 else 0
    facts = text.draw_facts(rng, recipe.split, slots - n_pairs, recipe.sibling_share)
    chosen = set(rng.permutation(len(facts))[:n_pairs].tolist())
    pairs = [(text.restate(rng, recipe.split, facts[i]), facts[i]) for i in chosen]
    singles = [fact for i, fact in enumerate(facts) if i not in chosen]
    return text.place_facts(rng, recipe.n_documents, recipe.facts_per_document, singles, pairs, recipe.near_share)


def _ask(
    rng: Generator, lex: Lexicon, ids: list[int], facts: list[tuple[int, Fact]], recipe: Recipe
) -> list[tuple[int, Fact]]:
    """Append the questions about `facts` (start, fact; in order) to `ids`; the offset and the fact of each answer."""
    starts = [start for start, _ in facts]
    answers = []
    for _ in range(recipe.n_questions):
        n_far = int(np.searchsorted(starts, len(ids) - recipe.min_distance, side="right"))
        if not n_far:
            raise ValueError(f"no fact is {recipe.min_distance} tokens or more before the question at {len(ids)}")
        fact = facts[rng.integers(n_far)][1]
        ids += lex.question(fact)
        answers.append((len(ids), fact))
        ids += [*lex.answer(fact), EOS_ID]
    return answers


def induction_sequence(
    rng: Generator,
    vocab_size: int,
    n_tokens: int,
    piece_tokens: tuple[int, int] = (8, 24),
    low_id: int = FIRST_WORD_ID,
    other_weight: float = 0.0,
    lead_tokens: int = 3,
) -> tuple[Ids, Weights]:
    """Random pieces, each repeated at random distances among fresh ones.

    Args:
        piece_tokens: shortest and longest piece in tokens.
        low_id: ids are drawn from `[low_id, vocab_size)`.
        lead_tokens: tokens at the start of a repeat that weigh `other_weight`; the rest of it weighs 1.
    """
    low, high = piece_tokens
    # Half of the sequence is first occurrences: a piece is new, or a repeat of any earlier one.
    n_pieces = n_tokens // low + 1
    fresh = (rng.random(n_pieces) < 0.5).tolist()
    lengths = rng.integers(low, high + 1, size=n_pieces).tolist()
    ids = rng.integers(low_id, vocab_size, size=n_tokens + high)
    weights = np.full(n_tokens + high, other_weight, dtype=np.float32)
    spans: list[tuple[int, int]] = []
    at = 0
    for new, length in zip(fresh, lengths, strict=True):
        if new or not spans:
            spans.append((at, length))
        else:
            source, length = spans[rng.integers(len(spans))]
            ids[at : at + length] = ids[source : source + length]
            weights[at + lead_tokens : at + length] = 1.0
        at += length
        if at >= n_tokens:
            break
    return ids[:n_tokens], weights[:n_tokens]


def keyvalue_sequence(
    rng: Generator,
    vocab_size: int,
    n_tokens: int,
    n_facts: int,
    n_queries: int,
    min_distance: int = 0,
    low_id: int = FIRST_WORD_ID,
    other_weight: float = 0.0,
    spacing: int = 8,
) -> tuple[Ids, Weights]:
    """Random 2-token keys with 2-token values among random tokens, then queries `key value` drawn with replacement.

    Facts start at least `spacing` tokens apart; queries start `spacing` tokens apart with random tokens between them.
    The values of queries weigh 1, everything else `other_weight`.

    Args:
        min_distance: tokens at least between the start of a fact and a query about it.
    """
    context = n_tokens - n_queries * spacing
    slack = context - n_facts * spacing
    if spacing < 4 or slack < 0:
        raise ValueError(f"{n_facts} facts and {n_queries} queries do not fit in {n_tokens} tokens, {spacing} apart")
    starts = np.sort(rng.integers(0, slack + 1, size=n_facts)) + spacing * np.arange(n_facts)
    ids = rng.integers(low_id, vocab_size, size=n_tokens)
    # Distinct first key tokens make every key unique.
    ids[starts] = rng.choice(np.arange(low_id, vocab_size), size=n_facts, replace=False)
    weights = np.full(n_tokens, other_weight, dtype=np.float32)
    queries = context + spacing * np.arange(n_queries)
    n_far = np.searchsorted(starts, queries - min_distance, side="right")
    if not n_far.all():
        raise ValueError(f"no fact is {min_distance} tokens or more before the first query")
    asked = starts[(rng.random(n_queries) * n_far).astype(np.int64)]
    ids[queries[:, None] + np.arange(4)] = ids[asked[:, None] + np.arange(4)]
    weights[queries[:, None] + np.arange(2, 4)] = 1.0
    return ids, weights
