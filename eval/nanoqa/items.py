"""Fresh samples of nano's generator as items: a context is a cluster, each question about it an item."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from eval.encoder import Encoder
from eval.items import DataSet, Item
from redknot.errors import ConfigError, InputError
from redknot.model.tokenizer import TOKENIZER_FILE
from redknot.nano.samples import Sample, make_sample
from redknot.nano.tokenizer import generator_pieces, to_vocab
from redknot.nano.worlds import TASKS

TIMING = "timing"
ANSWER_TOKENS = 16  # no answer is longer: name and value of two steps


@dataclass(frozen=True)
class Draw:
    """What contexts are drawn: how many, how long, of how many documents, and how many questions about each."""

    contexts: int
    questions: int
    tokens: tuple[int, int]  # of the longest prompt, lowest and highest
    documents: tuple[int, int]
    seed: int


class Generator:
    """The generator over a checkpoint's tokenizer, which must be nano's; InputError for another."""

    def __init__(self, checkpoint: Path, encoder: Encoder) -> None:
        self._encoder = encoder
        self._tokenizer = Tokenizer.from_file(str(checkpoint / TOKENIZER_FILE))
        vocab = self._tokenizer.get_vocab()
        if any(to_vocab(piece) not in vocab for piece in generator_pieces()):
            raise InputError(f"{checkpoint}: nanoqa writes in nano's language, and this tokenizer is not nano's")

    def dataset(self, task: str, draw: Draw) -> DataSet:
        """The samples of a task. Each depends on the seed and its number alone: more contexts go on where fewer end."""
        if task not in TASKS:
            raise ConfigError(f"nanoqa has no task {task!r}; it has {', '.join(TASKS)}")
        # The hardest draw, so that one without samples is refused now and not at the context that shows it.
        self._sample(np.random.default_rng(0), task, draw.tokens[0], draw.documents[1], draw.questions)

        def items() -> Iterator[Item]:
            for number in range(draw.contexts):
                rng = np.random.default_rng([draw.seed, *task.encode(), number])
                tokens = int(rng.integers(draw.tokens[0], draw.tokens[1] + 1))
                documents = int(rng.integers(draw.documents[0], draw.documents[1] + 1))
                sample = self._sample(rng, task, tokens, documents, draw.questions)
                yield from self._items(sample, str(number))

        return DataSet(task, items)

    def timing(self, lengths: tuple[int, ...], documents: int, seed: int) -> DataSet:
        """One question of each of these prompt lengths, for timing."""

        def items() -> Iterator[Item]:
            for length in lengths:
                rng = np.random.default_rng([seed, *TIMING.encode(), length])
                sample = self._sample(rng, next(iter(TASKS)), length, documents, 1)
                yield from self._items(sample, str(length), TIMING)

        return DataSet(TIMING, items)

    def _items(self, sample: Sample, cluster: str, dataset: str | None = None) -> Iterator[Item]:
        documents = tuple((document, True) for document in sample.documents)
        for number, (question, answer) in enumerate(sample.questions):
            ids = self._encoder.tokenizer.encode(answer)
            expected = self._encoder.tokenizer.decode(ids)  # as an answer of these tokens reads
            yield Item(
                dataset=dataset or sample.task,
                id=f"{cluster}/{number}",
                cluster=cluster,
                parts=(*documents, (question, False)),
                references=(expected,),
                max_new_tokens=len(ids),
                score=_Exactly(expected),
            )

    def _sample(self, rng: np.random.Generator, task: str, tokens: int, documents: int, questions: int) -> Sample:
        """One context; InputError for one that there is not, or that the model has no room for."""
        most = self._encoder.max_positions - ANSWER_TOKENS
        if tokens > most:
            raise InputError(f"{tokens} tokens: the model has room for prompts of {most}")
        try:
            return make_sample(rng, self._tokenizer, task, "test", tokens, documents, questions)
        except ValueError as error:
            raise InputError(
                f"{tokens} tokens, {documents} documents: {error}; give other --tokens or --documents"
            ) from None


@dataclass(frozen=True)
class _Exactly:
    """1 for the expected text, else 0."""

    expected: str

    def __call__(self, text: str) -> float:
        return float(text == self.expected)
