"""Training sequences for nano: documents with many questions, and two token-level curricula.

Each function returns ids [n_tokens] and loss weights [n_tokens]. A weight belongs to its token as the target:
`weights[i]` weighs the loss of predicting `ids[i]` from `ids[:i]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from tokenizers import Tokenizer

from redknot.nano import text, worlds
from redknot.nano.names import Split
from redknot.nano.statements import Question, lexicon
from redknot.nano.tokenizer import BOS_ID, EOS_ID, FIRST_WORD_ID
from redknot.nano.worlds import World

Ids = NDArray[np.int64]
Weights = NDArray[np.float32]


@dataclass(frozen=True)
class Recipe:
    """Composition of a training sequence.

    Attributes:
        task: "facts", a mixture of the tasks single and latest, or another task of `worlds`.
        latest_share: of "facts": expected share of slots that belong to a key stated in two documents.
        near_share: of "facts": share of the keys stated twice whose documents are neighbours, where there is room.
        task_share: of the other tasks: share of the questions that are the task's.
        other_weight: loss weight of every token outside answers.
    """

    task: str = "facts"
    n_documents: int = 4
    facts_per_document: int = 4
    n_questions: int = 8
    latest_share: float = 0.0
    near_share: float = 0.0
    task_share: float = 0.7
    other_weight: float = 0.05
    split: Split = "train"


def training_sequence(
    rng: Generator, tokenizer: Tokenizer, n_tokens: int, recipe: Recipe = Recipe()
) -> tuple[Ids, Weights]:
    """BOS, documents, then questions, each followed by its answer and EOS; none comes again before all of its kind did.

    The first answer to a question (value and full stop) weighs 1, everything else `recipe.other_weight`: a repeated one
    can be copied from the first.

    Raises:
        ValueError: the recipe does not fit in `n_tokens`.
    """
    lex = lexicon(tokenizer)
    world = _world(rng, recipe)
    rounds = [(one, lex.question(one), lex.answer(one)) for one in _draw(rng, world, recipe)]
    budget = n_tokens - 1 - sum(len(question) + len(answer) + 1 for _, question, answer in rounds)
    lengths = text.split_tokens(rng, budget, [text.min_document_tokens(lex, said) for said in world.documents])
    ids = [BOS_ID]
    for length, said in zip(lengths, world.documents, strict=True):
        ids += text.document_ids(rng, lex, length, said)
    weights = np.full(n_tokens, recipe.other_weight, dtype=np.float32)
    answered: set[Question] = set()
    for one, question, answer in rounds:
        ids += question
        if one not in answered:
            weights[len(ids) : len(ids) + len(answer)] = 1.0
        answered.add(one)
        ids += [*answer, EOS_ID]
    return np.asarray(ids, dtype=np.int64), weights


def _world(rng: Generator, recipe: Recipe) -> World:
    """What the documents say."""
    documents, capacity = recipe.n_documents, recipe.facts_per_document
    if recipe.task != "facts":
        return worlds.TASKS[recipe.task](rng, recipe.split, documents, capacity, recipe.n_questions)
    slots = documents * capacity
    n_pairs = int(rng.binomial(slots // 2, recipe.latest_share)) if documents > 1 else 0
    facts = worlds.draw_facts(rng, recipe.split, slots - n_pairs)
    chosen = set(rng.permutation(len(facts))[:n_pairs].tolist())
    pairs = [(worlds.restate(rng, recipe.split, facts[i]), facts[i]) for i in chosen]
    singles = [fact for i, fact in enumerate(facts) if i not in chosen]
    return World(worlds.place(rng, documents, capacity, singles, pairs, recipe.near_share), list(facts), [])


def _draw(rng: Generator, world: World, recipe: Recipe) -> list[Question]:
    """The questions of a sequence."""
    asked, besides = _rounds(rng, world.asked), _rounds(rng, world.besides)
    return [
        next(asked if not world.besides or rng.random() < recipe.task_share else besides)
        for _ in range(recipe.n_questions)
    ]


def _rounds(rng: Generator, questions: list[Question]) -> Iterator[Question]:
    """The questions in random order, again and again."""
    while questions:
        yield from (questions[index] for index in rng.permutation(len(questions)))


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
