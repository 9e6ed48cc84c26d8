"""A prompt as every arm gets it: token ids, and where the documents stand among them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Encoded:
    """Token ids [n] and the documents in them; equal hashes are equal prompts."""

    token_ids: npt.NDArray[np.int32]
    spans: tuple[tuple[int, int], ...]  # [start, end) of each document, in order
    sha256: str = field(init=False)  # over both

    def __post_init__(self) -> None:
        """Hash once; whoever sends a prompt elsewhere hashes what arrived, and compares."""
        object.__setattr__(self, "sha256", prompt_sha256(self.token_ids, self.spans))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def documents(self) -> tuple[npt.NDArray[np.int32], ...]:
        """The token ids of each document."""
        return tuple(self.token_ids[start:end] for start, end in self.spans)


def encoded(parts: Iterable[tuple[npt.ArrayLike, bool]]) -> Encoded:
    """Put parts together: token ids, and whether they are a document; empty ones are left out."""
    ids: list[npt.NDArray[np.int32]] = [np.zeros(0, np.int32)]
    spans, at = [], 0
    for given, is_document in parts:
        part = np.asarray(given, dtype=np.int32)
        if is_document and len(part):
            spans.append((at, at + len(part)))
        ids.append(part)
        at += len(part)
    return Encoded(np.concatenate(ids), tuple(spans))


def prompt_sha256(token_ids: npt.ArrayLike, spans: Iterable[tuple[int, int]]) -> str:
    """Hex SHA-256 of token ids and document spans; the number of ids comes first, so that no two prompts collide."""
    ids = np.asarray(token_ids, dtype="<i8")
    bounds = np.array([number for span in spans for number in span], dtype="<i8")
    return hashlib.sha256(np.int64(len(ids)).astype("<i8").tobytes() + ids.tobytes() + bounds.tobytes()).hexdigest()
