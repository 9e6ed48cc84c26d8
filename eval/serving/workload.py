"""What is asked of a server: prompts over a pool of documents, and when they arrive; all of it follows from a seed."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from eval.encoded import Encoded, encoded
from eval.names import QUESTION
from redknot.build.contents import tokenise
from redknot.build.documents import CorpusReport, read_corpus
from redknot.errors import InputError
from redknot.model.geometry import load_geometry
from redknot.model.tokenizer import TOKENIZER_FILE, load_tokenizer
from redknot.nano.corpus import questions, write_corpus
from redknot.nano.tokenizer import generator_pieces, to_vocab

_FACTS = 6  # of a generated document
_PROMPTS, _ARRIVALS = 0, 1  # what is drawn

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Generated:
    """A corpus from nano's generator."""

    documents: int
    tokens: int  # of each
    seed: int


@dataclass(frozen=True)
class Pool:
    """The documents [n] and questions [m] that prompts are made of, and what stands in front: BOS, or nothing."""

    documents: Sequence[Ids]
    questions: Sequence[Ids]
    before: tuple[int, ...]
    max_positions: int

    @property
    def sha256(self) -> str:
        """Hex SHA-256: equal pools make equal prompts."""
        digest = hashlib.sha256()
        for part in (np.asarray(self.before), *self.documents, *self.questions):
            digest.update(len(part).to_bytes(8, "little") + np.asarray(part, dtype="<i8").tobytes())
        return digest.hexdigest()

    def warming(self, documents: int) -> list[Encoded]:
        """As few prompts as have every document once."""
        starts = range(0, len(self.documents), documents)
        return [self._prompt(self.documents[at : at + documents], self.questions[0]) for at in starts]

    def prompts(self, count: int, documents: int, seed: Sequence[int]) -> list[Encoded]:
        """Prompts of so many different documents in random order, and a question."""
        rng = np.random.default_rng([*seed, _PROMPTS])
        found = []
        for _ in range(count):
            picked = rng.choice(len(self.documents), documents, replace=False)
            question = self.questions[rng.integers(len(self.questions))]
            found.append(self._prompt([self.documents[index] for index in picked], question))
        return found

    def longest(self, documents: int) -> int:
        """Tokens of the longest prompt that can be drawn."""
        sizes = sorted(map(len, self.documents))[-documents:]
        return len(self.before) + sum(sizes) + max(map(len, self.questions))

    def _prompt(self, documents: Sequence[Ids], question: Ids) -> Encoded:
        return encoded([(self.before, False), *((ids, True) for ids in documents), (question, False)])


def arrivals(count: int, rate: float, seed: Sequence[int]) -> list[float]:
    """Seconds from the start of a round at which requests of a Poisson process arrive, ``rate`` a second on average."""
    gaps = np.random.default_rng([*seed, _ARRIVALS]).exponential(1 / rate, count)
    return [float(at) for at in np.cumsum(gaps)]


def read_pool(checkpoint: Path, corpus: Path | Generated) -> Pool:
    """Documents of a corpus, or fresh ones; InputError for one without a document, or without nano's tokenizer."""
    if isinstance(corpus, Path):
        return _read(checkpoint, corpus)
    tokenizer = Tokenizer.from_file(str(checkpoint / TOKENIZER_FILE))
    if any(to_vocab(piece) not in tokenizer.get_vocab() for piece in generator_pieces()):
        raise InputError(f"{checkpoint} does not have nano's tokenizer, so no documents can be made; give --corpus")
    with tempfile.TemporaryDirectory(prefix="redknot-eval-") as folder:
        try:
            write_corpus(Path(folder), tokenizer, corpus.documents, corpus.tokens, _FACTS, corpus.seed)
        except ValueError as error:
            raise InputError(f"documents of {corpus.tokens} tokens: {error}; give longer ones") from None
        return _read(checkpoint, Path(folder))


def _read(checkpoint: Path, corpus: Path) -> Pool:
    geometry, report = load_geometry(checkpoint), CorpusReport()
    tokenizer = load_tokenizer(checkpoint, geometry)
    documents = list(read_corpus(corpus, report))
    contents = tokenise(documents, tokenizer, geometry.max_positions, report)
    if report.problems:
        raise InputError(f"{corpus} holds documents that cannot be used: {report.problems[0]}")
    if not contents.all:
        raise InputError(f"{corpus} holds no document")
    asked = [question for document in documents for question, _ in questions(document.text)] or [QUESTION]
    return Pool(
        documents=[content.token_ids for content in contents.all],
        questions=[np.asarray(tokenizer.encode(text), dtype=np.int32) for text in asked],
        before=() if tokenizer.bos_id is None else (tokenizer.bos_id,),
        max_positions=geometry.max_positions,
    )
