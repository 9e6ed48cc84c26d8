"""Documents of exact token lengths: statements scattered in filler sentences.

All randomness comes from the `numpy.random.Generator` passed in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.random import Generator
from tokenizers import Tokenizer

from redknot.nano.statements import Lexicon, Statement, Subject, Unnamed, lexicon

FRAME_TOKENS = 6  # "Document: old harbour\n" and the last "\n"
FILLER_MIN, FILLER_MAX = 6, 14  # tokens of one filler sentence


def min_document_tokens(lex: Lexicon, statements: Sequence[Statement]) -> int:
    """The shortest document that holds the statements, each with filler before and behind it.

    A subject that ends a document has none behind it: it stands right in front of what it is about.
    """
    gaps = len(statements) + (not _ends_with_subject(statements))
    return FRAME_TOKENS + gaps * FILLER_MIN + sum(len(lex.statement(said)) for said in statements)


def _ends_with_subject(statements: Sequence[Statement]) -> bool:
    return bool(statements) and isinstance(statements[-1], Subject)


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
    gaps = _gaps(rng, slack, statements)
    draws = iter(rng.random(2 * n_tokens).tolist())
    ids, slots = lex.ids, lex.slots
    title = [slots[kind][int(next(draws) * len(slots[kind]))] for kind in ("adjective", "place")]
    out = [ids["Document"], ids[":"], *title, ids["\n"]]
    body = _filler(lex, draws, gaps[0])
    out += [lex.unspaced[body[0]], *body[1:]]
    for said, gap in zip(statements, gaps[1:], strict=True):
        out += lex.statement(said) + _filler(lex, draws, gap)
    return [*out, ids["\n"]]


def _gaps(rng: Generator, slack: int, statements: Sequence[Statement]) -> list[int]:
    """Filler tokens before each statement and behind the last.

    What is over is spread at random, but not in front of values without a name: these stand close to their subject.
    """
    gaps = [FILLER_MIN] * len(statements) + [0 if _ends_with_subject(statements) else FILLER_MIN]
    wide = [index for index, said in enumerate(statements) if not isinstance(said, Unnamed)]
    if gaps[-1]:
        wide.append(len(statements))
    cuts = np.sort(rng.integers(0, slack + 1, size=len(wide) - 1))
    for index, more in zip(wide, np.diff(cuts, prepend=0, append=slack).tolist(), strict=True):
        gaps[index] += more
    return gaps


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
