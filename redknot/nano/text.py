"""Documents of exact token lengths: statements scattered in filler sentences.

All randomness comes from the `numpy.random.Generator` passed in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.random import Generator
from tokenizers import Tokenizer

from redknot.nano.statements import Lexicon, Statement, lexicon

FRAME_TOKENS = 6  # "Document: old harbour\n" and the last "\n"
FILLER_MIN, FILLER_MAX = 6, 14  # tokens of one filler sentence


def min_document_tokens(lex: Lexicon, statements: Sequence[Statement]) -> int:
    """The shortest document that holds the statements, each with filler before and behind it."""
    return FRAME_TOKENS + FILLER_MIN + sum(len(lex.statement(said)) + FILLER_MIN for said in statements)


def _filler(lex: Lexicon, draws: Iterator[float], n_tokens: int) -> list[int]:
    """Filler sentences of `n_tokens` tokens in all (at least FILLER_MIN)."""
    out: list[int] = []
    while n_tokens:
        length = n_tokens
        if n_tokens > FILLER_MAX:
            length = FILLER_MIN + int(next(draws) * (min(FILLER_MAX, n_tokens - FILLER_MIN) - FILLER_MIN + 1))
        templates = lex.templates[length]
        template = templates[int(next(draws) * len(templates))]
        out += [slot[int(next(draws) * len(slot))] if len(slot) > 1 else slot[0] for slot in template]
        n_tokens -= length
    return out


def document_ids(rng: Generator, lex: Lexicon, n_tokens: int, statements: Sequence[Statement]) -> list[int]:
    """Ids of a document of exactly `n_tokens` that makes the statements in order; ValueError if they do not fit."""
    slack = n_tokens - min_document_tokens(lex, statements)
    if slack < 0:
        raise ValueError(f"{len(statements)} statements need {n_tokens - slack} tokens or more, not {n_tokens}")
    cuts = np.sort(rng.integers(0, slack + 1, size=len(statements)))
    gaps = (np.diff(cuts, prepend=0, append=slack) + FILLER_MIN).tolist()
    draws = iter(rng.random(2 * n_tokens).tolist())
    ids, slots = lex.ids, lex.slots
    title = [slots[kind][int(next(draws) * len(slots[kind]))] for kind in ("adjective", "place")]
    out = [ids["Document"], ids[":"], *title, ids["\n"]]
    body = _filler(lex, draws, gaps[0])
    out += [lex.unspaced[body[0]], *body[1:]]
    for said, gap in zip(statements, gaps[1:], strict=True):
        out += lex.statement(said) + _filler(lex, draws, gap)
    return [*out, ids["\n"]]


def make_document(rng: Generator, tokenizer: Tokenizer, n_tokens: int, statements: Sequence[Statement]) -> str:
    """A document whose own tokenization has exactly `n_tokens` tokens and that makes the statements in order."""
    lex = lexicon(tokenizer)
    return lex.text(document_ids(rng, lex, n_tokens, statements))


def split_tokens(rng: Generator, total: int, minimum: Sequence[int]) -> list[int]:
    """Unequal document lengths in tokens that sum to `total`, each at least its minimum."""
    slack = total - sum(minimum)
    if slack < 0:
        raise ValueError(f"{len(minimum)} documents need {sum(minimum)} tokens or more, not {total}")
    base = np.asarray(minimum) + np.floor(rng.dirichlet(np.full(len(minimum), 8.0)) * slack).astype(np.int64)
    base[-1] += total - base.sum()
    return [int(length) for length in base]
