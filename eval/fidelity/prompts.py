"""Prompts to compare arms on: nano's own tasks, or the documents of a folder in random order behind each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eval.encoder import Encoder
from eval.items import DataSet, Item
from eval.nanoqa import items as nanoqa
from redknot.build.contents import tokenise
from redknot.build.documents import CorpusReport, Document, read_corpus
from redknot.build.heads import corpus_digest
from redknot.errors import InputError
from redknot.nano.worlds import TASKS


@dataclass(frozen=True)
class Draw:
    """What prompts are drawn."""

    prompts: int  # of each data set
    tokens: int  # of a prompt: exactly so many of nano's, at most so many of a corpus
    documents: int  # in a prompt, at most
    seed: int


def nano_sets(checkpoint: Path, encoder: Encoder, draw: Draw) -> list[DataSet]:
    """The tasks of nano's generator; errors as there."""
    documents, tokens = (draw.documents, draw.documents), (draw.tokens, draw.tokens)
    found, generator = nanoqa.Draw(draw.prompts, 1, tokens, documents, draw.seed), nanoqa.Generator(checkpoint, encoder)
    return [generator.dataset(task, found) for task in TASKS]


@dataclass(frozen=True)
class Corpus:
    """Documents that can be encoded, and what they are as a whole."""

    name: str
    digest: str
    documents: tuple[tuple[Document, int], ...]  # and their tokens
    left_out: tuple[str, ...]  # one line for each that cannot


def load_corpus(folder: Path, encoder: Encoder) -> Corpus:
    """Read a corpus as `redknot build` does; InputError when nothing of it can be used."""
    report = CorpusReport()
    documents = {document.name: document for document in read_corpus(folder, report)}
    contents = tokenise(documents.values(), encoder.tokenizer, encoder.max_positions, report).all
    if not contents:
        first = f": {report.problems[0]}" if report.problems else ""
        raise InputError(f"--corpus {folder}: no document that can be used{first}")
    found = tuple((documents[content.names[0]], len(content)) for content in contents)
    return Corpus(folder.name, corpus_digest(contents), found, tuple(map(str, report.problems)))


def corpus_set(corpus: Corpus, encoder: Encoder, draw: Draw, question: str) -> DataSet:
    """Prompts of whole documents and a question, each drawn by the seed and its number alone.

    InputError when not even the shortest document fits.
    """
    room = min(draw.tokens, encoder.max_positions) - len(encoder.tokenizer.encode(question)) - 1
    shortest = min(tokens for _, tokens in corpus.documents)
    if shortest > room:
        raise InputError(f"--tokens {draw.tokens}: the shortest document has {shortest}, beside BOS and the question")

    def items() -> Iterator[Item]:
        for number in range(draw.prompts):
            documents = _drawn(corpus.documents, np.random.default_rng([draw.seed, number]), room, draw.documents)
            parts = (*((document.text, True) for document in documents), (question, False))
            yield Item(corpus.name, str(number), str(number), parts, (), 1, score=lambda _: 0.0)

    return DataSet(corpus.name, items)


def _drawn(documents: Sequence[tuple[Document, int]], rng: np.random.Generator, room: int, most: int) -> list[Document]:
    """Up to ``most`` documents of at most ``room`` tokens together, in random order."""
    chosen: list[Document] = []
    for index in rng.permutation(len(documents)).tolist():
        document, tokens = documents[index]
        if len(chosen) < most and tokens <= room:
            chosen.append(document)
            room -= tokens
    return chosen
