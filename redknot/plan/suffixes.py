"""Known documents in a suffix array over the symbols of their aligned blocks.

A document of n tokens is a string of symbols: one 64-bit symbol per whole block, then one for the unaligned
tail (zero when there is none). A `Segment` keeps a suffix array over the strings of its documents, so the
documents that go on with the same blocks are always one interval, however many there are; adding a block
to a run narrows the interval by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from redknot.plan.hashing import BLOCK_BIT, Hashes, Ints, Tokens


@dataclass(slots=True, eq=False)
class Document:
    """One known document; `serial` is its rank in the order of addition."""

    artifact_id: str
    tokens: Tokens
    symbols: Hashes
    whole_hash: int
    serial: int
    segment: Segment | None = None
    slot: int = -1


@dataclass(frozen=True, slots=True)
class Lookup:
    """Per symbol asked for, zeros where it is unknown."""

    low: Ints  # the suffixes that start with it: order[low:high]
    high: Ints
    reach: Ints  # the most tokens that any of these documents has from here on
    closing: Ints  # the longest tail behind it where it is a document's last whole block


class Segment:
    """A suffix array over the block strings of some documents, in order of addition; immutable but for `drop`."""

    def __init__(self, documents: list[Document], block: int) -> None:
        self.documents = documents
        self._block = block
        self.symbols = np.concatenate([document.symbols for document in documents])
        counts = np.array([document.symbols.size for document in documents])
        ends = np.cumsum(counts)
        self.firsts = ends - counts
        self.owners = np.repeat(np.arange(len(documents)), counts)
        order = _suffix_order(self.symbols, ends[self.owners])
        self.order = order[len(documents) :]  # the tail symbols sort first; no run starts at one
        heads = self.symbols[self.order]
        fresh = np.flatnonzero(np.concatenate([[True], heads[1:] != heads[:-1]]))
        self._keys = heads[fresh]
        self._bounds = np.append(fresh, heads.size)
        lengths = np.array([document.tokens.size for document in documents])
        owners = self.owners[self.order]
        left = lengths[owners] - (self.order - self.firsts[owners]) * block
        self._reach = np.maximum.reduceat(left, fresh)
        self._closing = np.maximum.reduceat(np.where(left < 2 * block, left - block, 0), fresh)
        self._alive = np.ones(len(documents), bool)
        self._alive_sums: Ints | None = None  # living suffixes before each place of `order`; None while all live
        self._stale = False  # the sums are older than the last drop; the next lookup, first in a search, renews them
        for slot, document in enumerate(documents):
            document.segment, document.slot = self, slot

    @property
    def size(self) -> int:
        return int(self.symbols.size)

    @property
    def living(self) -> list[Document]:
        return [document for document in self.documents if self._alive[document.slot]]

    @property
    def mostly_dead(self) -> bool:
        return 2 * int(self._alive.sum()) <= len(self.documents)

    def drop(self, document: Document) -> None:
        """Hide a document from every later search."""
        self._alive[document.slot] = False
        self._stale = True

    def lookup(self, symbols: Hashes) -> Lookup:
        """What this segment knows of each symbol."""
        if self._stale:
            self._alive_sums = np.concatenate([[0], np.cumsum(self._alive[self.owners[self.order]])])
            self._stale = False
        at = np.minimum(np.searchsorted(self._keys, symbols), self._keys.size - 1)
        known = self._keys[at] == symbols
        low, high = self._bounds[at], self._bounds[at + 1]
        if self._alive_sums is not None:
            known &= self._alive_sums[high] > self._alive_sums[low]
        return Lookup(low * known, high * known, self._reach[at] * known, self._closing[at] * known)

    def narrow(self, low: int, high: int, depth: int, symbol: np.uint64) -> tuple[int, int]:
        """The part of the interval whose symbol number `depth` is `symbol`; (0, 0) when no living document is there."""
        order, symbols = self.order, self.symbols

        def symbol_at(position: int) -> np.uint64:
            found: np.uint64 = symbols[order[position] + depth]
            return found

        start = low + bisect_left(range(low, high), symbol, key=symbol_at)
        if start == high or symbol_at(start) != symbol:
            return 0, 0
        stop = high
        if symbol_at(high - 1) != symbol:
            stop = start + bisect_left(range(start, high), symbol + np.uint64(1), key=symbol_at)
        if self._alive_sums is not None and self._alive_sums[stop] == self._alive_sums[start]:
            return 0, 0
        return start, stop

    def tails(self, low: int, high: int, depth: int) -> Hashes:
        """Sorted tail symbols of the documents that end after `depth` blocks; they are the first of the interval."""
        order, symbols = self.order, self.symbols
        count = bisect_left(range(low, high), BLOCK_BIT, key=lambda position: symbols[order[position] + depth])
        return symbols[order[low : low + count] + depth]

    def earliest(self, low: int, high: int) -> int:
        """The living suffix of the earliest document, at its lowest block; -1 when none is alive."""
        positions = self.order[low:high]
        if self._alive_sums is not None:
            positions = positions[self._alive[self.owners[positions]]]
        return int(positions.min()) if positions.size else -1

    def locate(self, suffix: int) -> tuple[Document, int]:
        """The document of a suffix, and the token its block starts at."""
        slot = int(self.owners[suffix])
        return self.documents[slot], (suffix - int(self.firsts[slot])) * self._block


def _suffix_order(symbols: Hashes, ends: Ints) -> Ints:
    """All suffixes, sorted (prefix doubling over those still tied); a suffix stops at its document's end.

    Equal suffixes keep their order. log2(longest document) rounds at most, each over the tied suffixes only.
    """
    order = np.argsort(symbols, kind="stable")
    slots = np.arange(symbols.size)
    head = np.concatenate([[True], symbols[order[1:]] != symbols[order[:-1]]])
    rank = np.empty_like(slots)
    rank[order] = np.maximum.accumulate(np.where(head, slots, 0))
    span = 1
    while True:
        tied = np.flatnonzero(~head | np.append(~head[1:], False))
        active = order[tied]
        after = active + span
        second = np.where(after < ends[active], rank[np.minimum(after, symbols.size - 1)], -1)
        if not np.any(second >= 0):
            return order
        sorting = np.lexsort((second, rank[active]))
        active, second = active[sorting], second[sorting]
        order[tied] = active
        first = rank[active]
        head[tied] = np.concatenate([[True], (first[1:] != first[:-1]) | (second[1:] != second[:-1])])
        rank[active] = np.maximum.accumulate(np.where(head[tied], tied, 0))
        span *= 2
