"""Evaluation samples: documents of a request and questions about them, with the answers that should follow."""

from __future__ import annotations

from dataclasses import dataclass

from numpy.random import Generator
from tokenizers import Tokenizer

from redknot.nano.names import Split
from redknot.nano.statements import lexicon
from redknot.nano.text import document_ids, min_document_tokens, split_tokens
from redknot.nano.tokenizer import BOS_ID
from redknot.nano.worlds import TASKS

STATEMENT_TOKENS = 64  # document tokens a statement, where nothing else is said


@dataclass(frozen=True)
class Sample:
    """Documents, and questions about them with the text that should follow each."""

    task: str
    documents: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]


def make_sample(
    rng: Generator,
    tokenizer: Tokenizer,
    task: str,
    split: Split,
    n_tokens: int,
    n_documents: int,
    questions: int = 1,
    capacity: int | None = None,
) -> Sample:
    """Documents that with BOS and the longest question have exactly `n_tokens` tokens.

    Args:
        questions: at most; a short context has room for fewer.
        capacity: statements a document, by default one per 64 of its tokens.
    """
    lex = lexicon(tokenizer)
    if capacity is None:
        capacity = max(1, n_tokens // n_documents // STATEMENT_TOKENS)
    world = TASKS[task](rng, split, n_documents, capacity, questions)
    asked = [(lex.question(one), lex.answer(one)) for one in world.asked[:questions]]
    budget = n_tokens - 1 - max(len(question) for question, _ in asked)
    lengths = split_tokens(rng, budget, [min_document_tokens(lex, said) for said in world.documents])
    documents = (lex.text(document_ids(rng, lex, n, said)) for n, said in zip(lengths, world.documents, strict=True))
    return Sample(task, tuple(documents), tuple((lex.text(question), lex.text(answer)) for question, answer in asked))


def sample_ids(tokenizer: Tokenizer, sample: Sample, number: int = 0) -> list[list[int]]:
    """Segments `[[BOS], document ids..., question ids, answer ids]` of one question, each text tokenized alone."""
    texts = (*sample.documents, *sample.questions[number])
    return [[BOS_ID], *(tokenizer.encode(text, add_special_tokens=False).ids for text in texts)]
