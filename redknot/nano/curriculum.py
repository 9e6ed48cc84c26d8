"""What nano learns, and in which order: phases of sequences, layers and lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.random import Generator
from tokenizers import Tokenizer

from redknot.nano.parameters import GEOMETRY
from redknot.nano.sequences import Recipe, induction_sequence, keyvalue_sequence, training_sequence
from redknot.nano.tokenizer import FIRST_WORD_ID

CORE = (0, 1, 3, 5)
TOPK, ALL = GEOMETRY.index_topk, tuple(range(GEOMETRY.num_layers))
WORDS = GEOMETRY.vocab_size - FIRST_WORD_ID
Maker = Callable[[Generator, int], tuple[Any, Any]]


@dataclass(frozen=True)
class Phase:
    """One stage of the curriculum."""

    name: str
    layers: tuple[int, ...]
    n_tokens: int
    batch: int
    max_steps: int
    until: float  # running answer accuracy that ends the phase
    mixture: tuple[tuple[float, Maker], ...]
    distil: bool = False  # train only the indexers, on the attention the entries receive
    topk: int | None = None  # entries a row may read; None while the indexers are untrained
    lr_scale: float = 1.0
    lr_left: float = 0.5  # share of the learning rate that is left at the last step


def sentences(tokenizer: Tokenizer, **recipe: Any) -> Maker:
    """Documents and questions in words; lists draw one of the values a sequence."""

    def make(rng: Generator, n_tokens: int) -> tuple[Any, Any]:
        drawn = {key: rng.choice(value) if isinstance(value, list) else value for key, value in recipe.items()}
        drawn = {key: value.item() if hasattr(value, "item") else value for key, value in drawn.items()}
        return training_sequence(rng, tokenizer, n_tokens, Recipe(**drawn))

    return make


def induction(alphabet: int) -> Maker:
    """Random pieces of the first ``alphabet`` word tokens, repeated at random distances.

    A small alphabet first: each token's vectors are then trained often enough for the copying circuit to form.
    """

    def make(rng: Generator, n_tokens: int) -> tuple[Any, Any]:
        return induction_sequence(rng, FIRST_WORD_ID + alphabet, n_tokens)

    return make


def key_values(rng: Generator, n_tokens: int) -> tuple[Any, Any]:
    """Token-level facts beyond the window, then queries in the last third."""
    return keyvalue_sequence(
        rng, GEOMETRY.vocab_size, n_tokens, n_facts=n_tokens // 16, n_queries=n_tokens // 32, min_distance=40
    )


def curriculum(tokenizer: Tokenizer) -> list[Phase]:
    """The phases in order; the committed checkpoint is the state after the last one."""
    some, many = [1, 2, 3], [4, 6, 8]
    one = sentences(tokenizer, n_documents=[1, 2], facts_per_document=some, n_questions=3)
    both = sentences(tokenizer, n_documents=[2, 3, 4], facts_per_document=[2, 3], n_questions=6, latest_share=0.3)
    long = sentences(tokenizer, n_documents=many, facts_per_document=[2, 3], n_questions=12, latest_share=0.3)
    pairs = sentences(tokenizer, n_documents=[2, 3, 4], facts_per_document=[2], n_questions=7, latest_share=1.0)
    mostly = sentences(tokenizer, n_documents=many, facts_per_document=some, n_questions=12, latest_share=0.7)
    full = sentences(tokenizer, n_documents=many, facts_per_document=[*some, 4], n_questions=24, latest_share=0.85)
    near = sentences(
        tokenizer, n_documents=many, facts_per_document=[2, 3, 4], n_questions=12, latest_share=0.85, near_share=0.7
    )
    every = sentences(
        tokenizer, n_documents=many, facts_per_document=[2, 4, 6], n_questions=18, latest_share=0.6, near_share=0.4
    )
    owner: dict[str, Any] = {"task": "owner", "facts_per_document": [2, 3], "other_weight": 0.01}
    about: dict[str, Any] = {"task": "about", "facts_per_document": [2, 3], "other_weight": 0.01}
    hops = sentences(tokenizer, n_documents=[2, 3, 4], n_questions=6, **owner)
    subjects = sentences(tokenizer, n_documents=4, n_questions=8, **about)
    far_hops = sentences(tokenizer, n_documents=many, n_questions=12, **owner)
    far_subjects = sentences(tokenizer, n_documents=many, n_questions=18, **about)
    all_hops = sentences(tokenizer, n_documents=many, n_questions=20, **owner)
    all_subjects = sentences(tokenizer, n_documents=many, n_questions=24, **about)
    tasks_512 = ((0.35, hops), (0.35, subjects), (0.3, both))
    tasks_1024 = ((0.25, far_hops), (0.4, far_subjects), (0.25, near), (0.1, long))
    more_1024 = ((0.45, far_hops), (0.3, far_subjects), (0.2, near), (0.05, long))
    tasks_2048 = ((0.25, all_hops), (0.3, all_subjects), (0.45, every))
    return [
        Phase("alphabet-256", CORE, 128, 24, 1500, 0.80, ((1.0, induction(256)),)),
        Phase("alphabet-768", CORE, 128, 24, 600, 0.85, ((1.0, induction(768)),)),
        Phase("induction", CORE, 256, 12, 1200, 0.90, ((1.0, induction(WORDS)),)),
        Phase("key-value", CORE, 256, 12, 1500, 0.93, ((0.3, induction(WORDS)), (0.7, key_values))),
        Phase("sentences-256", CORE, 256, 12, 1500, 0.95, ((0.2, induction(WORDS)), (0.3, key_values), (0.5, one))),
        Phase("sentences-512", CORE, 512, 6, 500, 0.96, ((0.2, key_values), (0.8, both))),
        Phase("sentences-1024", CORE, 1024, 3, 250, 0.97, ((0.1, key_values), (0.9, long))),
        Phase("grow-512", ALL, 512, 6, 90, 0.985, ((0.1, key_values), (0.9, both)), lr_scale=0.5),
        Phase("long-1024", ALL, 1024, 3, 100, 0.985, ((1.0, long),), lr_scale=0.5),
        Phase("distil-1024", ALL, 1024, 3, 90, 2.0, ((1.0, long),), distil=True),
        Phase("latest-512", ALL, 512, 6, 500, 0.985, ((1.0, pairs),), topk=TOPK, lr_scale=0.5),
        Phase("latest-1024", ALL, 1024, 3, 200, 0.985, ((1.0, mostly),), topk=TOPK, lr_scale=0.3),
        Phase("full-2048", ALL, 2048, 2, 130, 0.992, ((1.0, full),), topk=TOPK, lr_scale=0.3),
        Phase("cool-2048", ALL, 2048, 2, 190, 2.0, ((1.0, full),), topk=TOPK, lr_scale=0.25, lr_left=0.05),
        Phase("near-1024", ALL, 1024, 3, 400, 2.0, ((0.8, near), (0.2, long)), topk=TOPK, lr_scale=0.3),
        Phase("last-2048", ALL, 2048, 2, 130, 2.0, ((1.0, every),), topk=TOPK, lr_scale=0.25, lr_left=0.05),
        Phase("tasks-512", ALL, 512, 6, 200, 0.985, tasks_512, topk=TOPK, lr_scale=0.5),
        Phase("tasks-1024", ALL, 1024, 3, 170, 2.0, tasks_1024, topk=TOPK, lr_scale=0.3),
        Phase("more-1024", ALL, 1024, 3, 300, 2.0, more_1024, topk=TOPK, lr_scale=0.4),
        Phase("tasks-2048", ALL, 2048, 2, 110, 2.0, tasks_2048, topk=TOPK, lr_scale=0.25, lr_left=0.05),
    ]
