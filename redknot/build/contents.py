"""Documents as token ids, each distinct content once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from redknot.artifact.identity import token_array, token_hash
from redknot.build.documents import CorpusReport, Document
from redknot.errors import InputError
from redknot.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Content:
    """One distinct content: its token ids, and every document that has it."""

    names: tuple[str, ...]
    source: str  # of the first of them
    token_ids: npt.NDArray[np.int32]
    token_hash: str

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass
class Contents:
    """The distinct contents of a corpus, in reading order."""

    all: list[Content] = field(default_factory=list)
    documents: int = 0  # names

    @property
    def tokens(self) -> int:
        """Tokens of all distinct contents."""
        return sum(map(len, self.all))

    @property
    def identical(self) -> int:
        """Documents whose content another one has."""
        return self.documents - len(self.all)


def tokenise(documents: Iterable[Document], tokenizer: Tokenizer, max_positions: int, report: CorpusReport) -> Contents:
    """Encode documents and bring those with the same token ids together.

    A document that does not encode or exceeds the model's positions is a problem of its own.
    """
    found: dict[str, Content] = {}
    contents = Contents()
    for document in documents:
        try:
            ids = _encode(document.text, tokenizer, max_positions)
        except InputError as error:
            report.problem(document.source, str(error))
            continue
        if not len(ids):
            report.empty += 1
            continue
        contents.documents += 1
        key = token_hash(ids)
        known = found.get(key)
        if known is None:
            found[key] = Content((document.name,), document.source, ids, key)
        else:
            found[key] = replace(known, names=(*known.names, document.name))
    contents.all = list(found.values())
    return contents


def _encode(text: str, tokenizer: Tokenizer, max_positions: int) -> npt.NDArray[np.int32]:
    """Token ids of one document, [n]; InputError when there are none for it, or too many."""
    if tokenizer.exceeds(text, max_positions):
        raise InputError(f"more than {max_positions} tokens, the model has {max_positions} positions")
    ids = token_array(tokenizer.encode(text))
    if len(ids) > max_positions:
        raise InputError(f"{len(ids)} tokens, the model has {max_positions} positions")
    return ids
