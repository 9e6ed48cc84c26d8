"""Synthetic documents, questions and evaluation samples for nano.

A fact reads "The <relation> of <First Last> is <word> <number>."; a question repeats those words up to "is". Facts are
scattered in filler sentences. Text is assembled from token ids (every word is one token), and the ids equal what the
tokenizer returns for the text. All randomness comes from the `numpy.random.Generator` passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from tokenizers import Tokenizer

from redknot.nano import names
from redknot.nano.names import Split
from redknot.nano.tokenizer import BOS_ID, generator_pieces, to_vocab

FACT_TOKENS = 11  # " The code of Marla Quintel is amber 157."
QUESTION_TOKENS = 24  # "\nQuestion: ... Answer: The code of Marla Quintel is"
ANSWER_TOKENS = 3  # " amber 157."
FRAME_TOKENS = 6  # "Document: old harbour\n" and the last "\n"
FILLER_MIN, FILLER_MAX = 6, 14  # tokens of one filler sentence


class Fact(NamedTuple):
    """One statement; names are (head, tail) syllables, the value is (word, number)."""

    relation: str
    first: tuple[str, str]
    last: tuple[str, str]
    value: tuple[str, str]

    @property
    def name(self) -> str:
        """First and last name as written."""
        return f"{''.join(self.first)} {''.join(self.last)}"


@dataclass(frozen=True)
class Sample:
    """A prompt (documents, then the question) and the text that should follow it."""

    documents: tuple[str, ...]
    question: str
    answer: str
    task: str


class Lexicon:
    """Token ids of the generator's pieces, and the filler templates as tuples of candidate ids per slot."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocab = tokenizer.get_vocab()
        self.ids = {piece: vocab[to_vocab(piece)] for piece in [*generator_pieces(), *":?.\n"]}
        self.pieces = {index: piece for piece, index in self.ids.items()}
        self.slots = {kind: tuple(self.ids[f" {w}"] for w in words) for kind, words in names.FILLER_WORDS.items()}
        self.unspaced = {self.ids[f" {word}"]: self.ids[word] for word in names.FILLER_WORDS["start"]}
        self.templates: dict[int, list[list[tuple[int, ...]]]] = {}
        for words in names.FILLER_TEMPLATES:
            template = [self.slots.get(word) or (self.ids["." if word == "." else f" {word}"],) for word in words]
            self.templates.setdefault(len(words), []).append(template)

    def text(self, ids: Sequence[int]) -> str:
        """The text of generator ids."""
        return "".join(self.pieces[index] for index in ids)

    def key(self, fact: Fact) -> list[int]:
        """Ids of " <relation> of <First Last>"."""
        ids = self.ids
        (first, first_tail), (last, last_tail) = fact.first, fact.last
        name = [ids[f" {first}"], ids[first_tail], ids[f" {last}"], ids[last_tail]]
        return [ids[f" {fact.relation}"], ids[" of"], *name]

    def stem(self, fact: Fact) -> list[int]:
        """Ids of " The <relation> of <First Last> is"."""
        return [self.ids[" The"], *self.key(fact), self.ids[" is"]]

    def answer(self, fact: Fact) -> list[int]:
        """Ids of " <word> <number>." [ANSWER_TOKENS]."""
        return [self.ids[f" {fact.value[0]}"], self.ids[f" {fact.value[1]}"], self.ids["."]]

    def question(self, fact: Fact) -> list[int]:
        """Ids of the question up to and including "is" [QUESTION_TOKENS]."""
        ids = self.ids
        ask = [ids["\n"], ids["Question"], ids[":"], ids[" What"], ids[" is"], ids[" the"], *self.key(fact), ids["?"]]
        return [*ask, ids["\n"], ids["Answer"], ids[":"], *self.stem(fact)]


@lru_cache(maxsize=4)
def lexicon(tokenizer: Tokenizer) -> Lexicon:
    """The lexicon of a tokenizer object, made once."""
    return Lexicon(tokenizer)


def min_document_tokens(n_facts: int) -> int:
    """The shortest document that holds `n_facts` facts, each with filler before and behind it."""
    return FRAME_TOKENS + n_facts * FACT_TOKENS + (n_facts + 1) * FILLER_MIN


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


def document_ids(rng: Generator, lex: Lexicon, n_tokens: int, facts: Sequence[Fact]) -> tuple[list[int], list[int]]:
    """Ids of a document of exactly `n_tokens`, and the offset at which each fact starts."""
    slack = n_tokens - min_document_tokens(len(facts))
    if slack < 0:
        raise ValueError(f"{len(facts)} facts need {min_document_tokens(len(facts))} tokens or more, not {n_tokens}")
    cuts = np.sort(rng.integers(0, slack + 1, size=len(facts)))
    gaps = (np.diff(cuts, prepend=0, append=slack) + FILLER_MIN).tolist()
    draws = iter(rng.random(2 * n_tokens).tolist())
    ids, slots = lex.ids, lex.slots
    title = [slots[kind][int(next(draws) * len(slots[kind]))] for kind in ("adjective", "place")]
    out = [ids["Document"], ids[":"], *title, ids["\n"]]
    body = _filler(lex, draws, gaps[0])
    out += [lex.unspaced[body[0]], *body[1:]]
    starts = []
    for fact, gap in zip(facts, gaps[1:], strict=True):
        starts.append(len(out))
        out += lex.stem(fact) + lex.answer(fact) + _filler(lex, draws, gap)
    return [*out, ids["\n"]], starts


def make_document(rng: Generator, tokenizer: Tokenizer, n_tokens: int, facts: Sequence[Fact]) -> str:
    """A document whose own tokenization has exactly `n_tokens` tokens and that states `facts` in order."""
    lex = lexicon(tokenizer)
    return lex.text(document_ids(rng, lex, n_tokens, facts)[0])


def draw_facts(rng: Generator, split: Split, n_facts: int, sibling_share: float = 0.0) -> list[Fact]:
    """Facts with distinct keys; names are distinct too, except for a `sibling_share` of repeated ones."""
    firsts, lasts, values = names.first_names(split), names.last_names(split), names.values(split)
    facts: list[Fact] = []
    used: set[tuple[tuple[str, str], tuple[str, str]]] = set()
    sibling = (rng.random(n_facts) < sibling_share).tolist()
    while len(facts) < n_facts:
        first, last = firsts[rng.integers(len(firsts))], lasts[rng.integers(len(lasts))]
        value = values[rng.integers(len(values))]
        relation = int(rng.integers(len(names.RELATIONS)))
        if sibling[len(facts)] and facts and not sibling[len(facts) - 1]:
            other = names.RELATIONS.index(facts[-1].relation) + 1 + relation % (len(names.RELATIONS) - 1)
            facts.append(facts[-1]._replace(relation=names.RELATIONS[other % len(names.RELATIONS)], value=value))
        elif (first, last) not in used:
            used.add((first, last))
            facts.append(Fact(names.RELATIONS[relation], first, last, value))
    return facts


def restate(rng: Generator, split: Split, fact: Fact) -> Fact:
    """The same key with another value."""
    values = names.values(split)
    value = fact.value
    while value == fact.value:
        value = values[rng.integers(len(values))]
    return fact._replace(value=value)


def place_facts(
    rng: Generator,
    n_documents: int,
    capacity: int,
    singles: Sequence[Fact],
    pairs: Sequence[tuple[Fact, Fact]] = (),
    near_share: float = 0.0,
) -> list[list[Fact]]:
    """Facts per document, shuffled, at most `capacity` each; the second of a pair is in a later document.

    A `near_share` of the pairs is in neighbouring documents, as long as there are such with room: told apart only by
    what stood before, since their distances from a question are nearly the same.
    """
    placed: list[list[Fact]] = [[] for _ in range(n_documents)]
    for left, pair in zip(range(len(pairs) - 1, -1, -1), pairs, strict=True):
        # The emptiest documents first, so that no pair is left with a single open document.
        order = sorted(rng.permutation(n_documents).tolist(), key=lambda index: len(placed[index]))
        if near_share and rng.random() < near_share:
            order = _neighbours(rng, [capacity - len(facts) for facts in placed], left) or order
        for fact, index in zip(pair, sorted(order[:2]), strict=True):
            placed[index].append(fact)
    room = [index for index in range(n_documents) for _ in range(capacity - len(placed[index]))]
    for fact, index in zip(singles, rng.permutation(room)[: len(singles)].tolist(), strict=True):
        placed[index].append(fact)
    return [[facts[i] for i in rng.permutation(len(facts))] for facts in placed]


def _neighbours(rng: Generator, room: Sequence[int], left: int) -> list[int]:
    """Two neighbouring documents for one pair that leave room for `left` more pairs, empty if there are none."""
    for first in rng.permutation(len(room) - 1).tolist():
        after = [count - (index in (first, first + 1)) for index, count in enumerate(room)]
        if min(after) >= 0 and sum(min(count, left) for count in after) >= 2 * left:
            return [first, first + 1]
    return []


def split_tokens(rng: Generator, total: int, minimum: Sequence[int]) -> list[int]:
    """Unequal document lengths in tokens that sum to `total`, each at least its minimum."""
    slack = total - sum(minimum)
    if slack < 0:
        raise ValueError(f"{len(minimum)} documents need {sum(minimum)} tokens or more, not {total}")
    base = np.asarray(minimum) + np.floor(rng.dirichlet(np.full(len(minimum), 8.0)) * slack).astype(np.int64)
    base[-1] += total - base.sum()
    return [int(length) for length in base]


# A task returns the facts of each document and the fact that answers the question.
Task = Callable[[Generator, Split, int, int], tuple[list[list[Fact]], Fact]]
TASKS: dict[str, Task] = {}


def task(name: str) -> Callable[[Task], Task]:
    """Register a task under `name`; it is called with (rng, split, n_documents, facts_per_document)."""

    def register(function: Task) -> Task:
        TASKS[name] = function
        return function

    return register


@task("single")
def _single(rng: Generator, split: Split, n_documents: int, capacity: int) -> tuple[list[list[Fact]], Fact]:
    """Every key is stated once."""
    facts = draw_facts(rng, split, n_documents * capacity)
    return place_facts(rng, n_documents, capacity, facts), facts[0]


@task("latest")
def _latest(rng: Generator, split: Split, n_documents: int, capacity: int) -> tuple[list[list[Fact]], Fact]:
    """The key is stated in two documents with different values; the later document holds."""
    if n_documents < 2:
        raise ValueError("the task 'latest' needs two documents or more")
    fact, *others = draw_facts(rng, split, n_documents * capacity - 1)
    return place_facts(rng, n_documents, capacity, others, [(restate(rng, split, fact), fact)]), fact


def make_sample(
    rng: Generator,
    tokenizer: Tokenizer,
    task: str,
    split: Split,
    n_tokens: int,
    n_documents: int,
    facts_per_document: int | None = None,
) -> Sample:
    """A prompt of exactly `n_tokens` tokens (BOS, documents, question) and its answer.

    Args:
        facts_per_document: by default one per 64 document tokens.
    """
    lex = lexicon(tokenizer)
    budget = n_tokens - 1 - QUESTION_TOKENS
    capacity = facts_per_document or max(1, budget // n_documents // 64)
    placed, asked = TASKS[task](rng, split, n_documents, capacity)
    lengths = split_tokens(rng, budget, [min_document_tokens(len(facts)) for facts in placed])
    documents = tuple(lex.text(document_ids(rng, lex, n, facts)[0]) for n, facts in zip(lengths, placed, strict=True))
    return Sample(documents, lex.text(lex.question(asked)), lex.text(lex.answer(asked)), task)


def swap_latest(sample: Sample) -> Sample:
    """A `latest` sample with the two documents that state the key exchanged, and the answer that then holds."""
    stem = sample.question.rpartition("Answer:")[2]
    early, late = (index for index, text in enumerate(sample.documents) if stem in text)
    documents = list(sample.documents)
    documents[early], documents[late] = documents[late], documents[early]
    answer = documents[late].partition(stem)[2].partition(".")[0] + "."
    return replace(sample, documents=tuple(documents), answer=answer)


def sample_ids(tokenizer: Tokenizer, sample: Sample) -> list[list[int]]:
    """Segments `[[BOS], document ids..., question ids, answer ids]`, each text tokenized alone."""
    texts = (*sample.documents, sample.question, sample.answer)
    return [[BOS_ID], *(tokenizer.encode(text, add_special_tokens=False).ids for text in texts)]
