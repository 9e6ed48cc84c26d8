"""Known documents by content, for searches: additions and removals, whole contents, and the symbols that may be known.

`TokenIndex` holds a few segments (`redknot.plan.suffixes`) of geometrically falling sizes: additions wait until the
next search and are merged then, so n additions cost O(n log n) in any pattern.

Symbols only propose. Every run that leaves the matcher was compared token by token.
Not thread safe: the owner serialises calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from redknot.errors import InputError
from redknot.plan.hashing import Hashes, Ints, RollingHash, Tokens, block_symbols, check_token_ids, tail_symbols
from redknot.plan.suffixes import Document, Segment

_SLOTS_PER_BLOCK = 16  # prefilter density: about 6 % of unknown windows pass at the lowest setting
_MAX_PREFILTER_BITS = 26


@dataclass(eq=False)
class TokenIndex:
    """Documents by content, for the searches in `redknot.plan.match`. One index serves one namespace.

    Documents shorter than a block are held but never matched.
    """

    block: int
    hasher: RollingHash = field(default_factory=RollingHash)
    counters: dict[str, int] = field(default_factory=lambda: {"match_collisions": 0, "match_cut_short": 0})

    def __post_init__(self) -> None:
        if self.block < 1:
            raise InputError(f"block must be at least 1 token, found {self.block}")
        self.longest_tail = 0
        self._documents: dict[str, Document] = {}
        self._whole: dict[int, dict[int, list[Document]]] = {}
        self._pending: dict[str, Document] = {}
        self._segments: list[Segment] = []
        self._prefilter = np.zeros(1, bool)
        self._shift = 63
        self._serial = 0

    def __len__(self) -> int:
        return len(self._documents)

    def __contains__(self, artifact_id: object) -> bool:
        return artifact_id in self._documents

    def length(self, artifact_id: str) -> int:
        """Tokens of one document."""
        return int(self._get(artifact_id).tokens.size)

    def add(self, artifact_id: str, token_ids: npt.NDArray[Any]) -> None:
        """Make one document findable; the token ids are copied."""
        if artifact_id in self._documents:
            raise InputError(f"artifact {artifact_id!r} is in the index already; remove it first")
        tokens = check_token_ids(token_ids)
        if not tokens.size:
            raise InputError(f"artifact {artifact_id!r} has no tokens; an empty document cannot be matched")
        document = self._documents[artifact_id] = self._document(artifact_id, tokens.copy())
        self._serial += 1
        if tokens.size < self.block:
            return
        self._whole.setdefault(tokens.size, {}).setdefault(document.whole_hash, []).append(document)
        self._pending[artifact_id] = document
        self.longest_tail = max(self.longest_tail, tokens.size % self.block)

    def remove(self, artifact_id: str) -> None:
        """Forget one document."""
        document = self._get(artifact_id)
        del self._documents[artifact_id]
        self._pending.pop(artifact_id, None)
        if document.segment is not None:
            document.segment.drop(document)
        by_hash = self._whole.get(document.tokens.size, {})
        if document.whole_hash in by_hash:
            by_hash[document.whole_hash].remove(document)
            if not by_hash[document.whole_hash]:
                del by_hash[document.whole_hash]
            if not by_hash:
                del self._whole[document.tokens.size]

    def whole(self, length: int) -> dict[int, list[Document]]:
        """Matchable documents of exactly `length` tokens by content hash, earliest first."""
        return self._whole.get(length, {})

    def segments(self) -> list[Segment]:
        """The sealed segments, after merging what was added or removed since the last call."""
        if self._pending or any(segment.mostly_dead for segment in self._segments):
            self._seal()
        return self._segments

    def candidates(self, symbols: Hashes) -> Ints:
        """Where `symbols` may be known: all that are, and a few that are not."""
        return np.flatnonzero(self._prefilter[symbols.view(np.int64) >> self._shift])

    def _get(self, artifact_id: str) -> Document:
        if artifact_id not in self._documents:
            raise InputError(f"artifact {artifact_id!r} is not in the index")
        return self._documents[artifact_id]

    def _document(self, artifact_id: str, tokens: Tokens) -> Document:
        prefix = self.hasher.prefix(tokens)
        aligned, tail = tokens.size // self.block * self.block, tokens.size % self.block
        symbols = np.zeros(tokens.size // self.block + 1, np.uint64)
        starts = np.arange(0, aligned, self.block)
        symbols[:-1] = block_symbols(self.hasher.windows(prefix, self.block, starts))
        if tail:
            symbols[-1] = tail_symbols(self.hasher.windows(prefix, tail, aligned), tail)[0]
        whole_hash = int(self.hasher.windows(prefix, tokens.size, 0)[0])
        return Document(artifact_id, tokens, symbols, whole_hash, self._serial)

    def _seal(self) -> None:
        fresh = list(self._pending.values())
        self._pending.clear()
        kept: list[Segment] = []
        for segment in self._segments:
            if not segment.mostly_dead:
                kept.append(segment)
            elif segment.living:
                kept.append(Segment(segment.living, self.block))
        size = sum(document.symbols.size for document in fresh)
        while fresh and kept and kept[-1].size <= 2 * size:
            last = kept.pop()
            size += last.size
            fresh = last.living + fresh
        if fresh:
            kept.append(Segment(fresh, self.block))
        self._segments = kept
        self._fill_prefilter()

    def _fill_prefilter(self) -> None:
        blocks = sum(segment.order.size for segment in self._segments)
        bits = min(_MAX_PREFILTER_BITS, max(10, (_SLOTS_PER_BLOCK * blocks - 1).bit_length()))
        fresh = self._segments[-1:]
        if 1 << bits > self._prefilter.size:
            self._prefilter = np.zeros(1 << bits, bool)
            self._shift = 63 - bits
            fresh = self._segments
        for segment in fresh:
            # the top bit of a block symbol is set: as int64 it indexes the table from its end, -size..-1
            self._prefilter[segment.symbols[segment.order].view(np.int64) >> self._shift] = True
