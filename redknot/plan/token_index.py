"""Known documents, indexed by the content of their aligned blocks.

A document of n tokens is a string of symbols: one 64-bit symbol per whole block, then one for the unaligned
tail (zero when there is none). A `Segment` keeps a suffix array over the strings of its documents, so the
documents that go on with the same blocks are always one interval, however many there are; adding a block
to a run narrows the interval by bisection. `TokenIndex` holds a few segments of geometrically falling sizes:
additions wait until the next search and are merged then, so n additions cost O(n log n) in any pattern.

Symbols only propose. Every run that leaves the matcher was compared token by token.
Not thread safe: the owner serialises calls.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from redknot.errors import InputError

Tokens = npt.NDArray[np.int32]
Hashes = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

_MAX_ID = 2**31 - 1
_BLOCK_BIT = np.uint64(1 << 63)  # set in block symbols, clear in tail symbols: in an interval the tails come first
_SLOTS_PER_BLOCK = 16  # prefilter density: about 6 % of unknown windows pass at the lowest setting
_MAX_PREFILTER_BITS = 26


def check_token_ids(tokens: object) -> Tokens:
    """`tokens` as contiguous int32, or InputError; an int32 array is returned as it is."""
    if not isinstance(tokens, np.ndarray):
        raise InputError(f"token ids must be a one-dimensional integer numpy array, found {type(tokens).__name__}")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InputError(
            f"token ids must be a one-dimensional integer array, found shape {tokens.shape} of {tokens.dtype}"
        )
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) > _MAX_ID):
        raise InputError(f"token ids must lie in 0..{_MAX_ID}, found {int(tokens.min())}..{int(tokens.max())}")
    return np.ascontiguousarray(tokens, dtype=np.int32)


class RollingHash:
    """Polynomial hashes modulo 2^64 of all windows of a token array, from one prefix sum.

    Token ids are mixed (splitmix64, salted) before they are summed. The salt and base are random per instance unless
    `seed` is given, so nobody outside the process can prepare colliding contents. Tests override `windows`.
    """

    def __init__(self, seed: int | None = None) -> None:
        seed = secrets.randbits(64) if seed is None else seed % 2**64
        self._salt = np.uint64(seed)
        self._base = (int(self._mixed(np.array([seed & _MAX_ID]))[0]) & ~7) | 5  # 5 mod 8: order 2^62
        self._inverse = pow(self._base, -1, 2**64)
        self._powers: Hashes = np.ones(1, np.uint64)
        self._inverses: Hashes = np.ones(1, np.uint64)

    def prefix(self, tokens: Tokens | Ints) -> Hashes:
        """Prefix sums of length n + 1, the input of `windows`."""
        while self._powers.size <= tokens.size:
            self._powers = self._doubled(self._powers, self._base)
            self._inverses = self._doubled(self._inverses, self._inverse)
        terms = self._mixed(tokens)
        terms *= self._powers[: tokens.size]
        sums = np.zeros(tokens.size + 1, np.uint64)
        np.cumsum(terms, out=sums[1:])
        return sums

    def windows(self, prefix: Hashes, lengths: int | Ints, starts: int | Ints | None = None) -> Hashes:
        """Hashes of the windows [start, start + length); of all windows of one length where `starts` is None."""
        if starts is None:
            count = max(0, prefix.size - int(lengths))
            sums = prefix[prefix.size - count :] - prefix[:count]
            sums *= self._inverses[:count]
            return sums
        starts, lengths = np.atleast_1d(starts), np.atleast_1d(lengths)
        result: Hashes = (prefix[starts + lengths] - prefix[starts]) * self._inverses[starts]
        return result

    def _mixed(self, tokens: npt.NDArray[Any]) -> Hashes:
        x = tokens.astype(np.uint64)
        x *= np.uint64(0x9E3779B97F4A7C15)
        x += self._salt
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x ^= x >> np.uint64(shift)
            x *= np.uint64(factor)
        x ^= x >> np.uint64(31)
        return x

    @staticmethod
    def _doubled(powers: Hashes, base: int) -> Hashes:
        return np.concatenate([powers, powers * np.uint64(pow(base, powers.size, 2**64))])


def block_symbols(hashes: Hashes) -> Hashes:
    """Symbols of whole blocks: never equal to a tail's, whatever the hash function does."""
    return hashes | _BLOCK_BIT


def tail_symbols(hashes: Hashes, lengths: int | Ints) -> Hashes:
    """Symbols of tails of 1.. tokens: the length in bits 40..62, 40 bits of the hash below it."""
    sized: Hashes = np.asarray(lengths).astype(np.uint64) << np.uint64(40)
    return sized | (hashes >> np.uint64(24))


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
        count = bisect_left(range(low, high), _BLOCK_BIT, key=lambda position: symbols[order[position] + depth])
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


@dataclass(eq=False)
class TokenIndex:
    """Documents by content, for the searches in `redknot.plan.match`. One index serves one namespace.

    Documents shorter than `min_length` (default: a block) are held but never matched.
    """

    block: int
    min_length: int | None = None
    hasher: RollingHash = field(default_factory=RollingHash)
    counters: dict[str, int] = field(default_factory=lambda: {"match_collisions": 0, "match_cut_short": 0})

    def __post_init__(self) -> None:
        if self.block < 1:
            raise InputError(f"block must be at least 1 token, found {self.block}")
        self.shortest = self.block if self.min_length is None else self.min_length
        if self.shortest < 1:
            raise InputError(f"min_length must be at least 1 token, found {self.shortest}")
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
        if tokens.size < self.shortest:
            return
        self._whole.setdefault(tokens.size, {}).setdefault(document.whole_hash, []).append(document)
        if tokens.size >= self.block:
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

    def short_lengths(self) -> list[int]:
        """Lengths below one block that some matchable document has, longest first."""
        if self.shortest >= self.block:
            return []
        return sorted((length for length in self._whole if length < self.block), reverse=True)

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
