"""The search for the longest runs of one request in one index; what a run is, `redknot.plan.match` says.

Rolling hashes propose places, a suffix array proposes documents, tokens are compared at the end, so a content that
merely collides is a miss and counted. An upper bound on the run at every place lets most places go unexamined; a
place whose bound was too high costs one examination, and all places with the same content learn from it. Such
failures are paid from `_PATIENCE`: once it is spent (adversarial inputs only), runs are taken where the bound is
highest without proof that none is longer, and the search counts as cut short. After `MAX_COLLISIONS` false hits it
stops and the rest is new text. So a search of n tokens examines at most n / block places plus a constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from redknot.plan.hashing import Hashes, Ints, Tokens, block_symbols, tail_symbols
from redknot.plan.suffixes import Document, Segment
from redknot.plan.token_index import TokenIndex

_PATIENCE = 4_000_000  # in units of roughly 5 ns
_COST_EXAMINE = 10_000
_COST_BLOCK = 500
MAX_COLLISIONS = 256


@dataclass(frozen=True, slots=True)
class Match:
    """Request tokens [start, start + length) equal tokens [doc_start, doc_start + length) of a document."""

    artifact_id: str
    start: int
    doc_start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class _Run:
    length: int
    ends: bool = False
    document: Document | None = None
    doc_start: int = 0

    @property
    def merit(self) -> tuple[int, bool, int]:
        return self.length, self.ends, -self.document.serial if self.document else 0


class _Memo:
    """A segment whose answers are kept for one search: repetitive requests ask the same again and again."""

    def __init__(self, segment: Segment) -> None:
        self.narrow = cache(segment.narrow)
        self.tails = cache(segment.tails)
        self.earliest = cache(segment.earliest)
        self.locate = segment.locate


class Search:
    """One request against one index. `places` are the tokens where a known block starts, in order."""

    def __init__(self, tokens: Tokens, index: TokenIndex, segments: list[Segment]) -> None:
        self.matches: list[Match] = []
        self.cut_short = False
        self._tokens = tokens
        self._index = index
        self._prefix = index.hasher.prefix(tokens)
        self._symbols: Hashes = block_symbols(index.hasher.windows(self._prefix, index.block))
        self._patience = _PATIENCE
        self._collisions = 0
        places = index.candidates(self._symbols)
        lookups = [(segment, segment.lookup(self._symbols[places])) for segment in segments]
        reach = np.max([found.reach for _, found in lookups], axis=0) if lookups else np.zeros(0, np.int64)
        known = np.flatnonzero(reach)
        self._places = places[known]
        self._intervals = [(_Memo(segment), found.low[known], found.high[known]) for segment, found in lookups]
        self._limits = tokens.size - self._places  # tokens to the next taken run or the end
        self._bounds = reach[known]
        if known.size:
            closing = np.max([found.closing for _, found in lookups], axis=0)
            self._bounds = self._upper_bounds(reach[known], closing[known])

    def _upper_bounds(self, reach: Ints, closing: Ints) -> Ints:
        """Per place, a length no run there exceeds: its blocks must be places too, and documents end."""
        size, block = self._tokens.size, self._index.block
        rows = size // block + 1
        caps = np.zeros(rows * block, np.int64)
        caps[self._places + block] = closing
        caps[self._places] = reach
        np.minimum(caps, size - np.arange(caps.size), out=caps)
        table = caps.reshape(rows, block)
        table += np.arange(0, rows * block, block)[:, None]
        np.minimum.accumulate(table[::-1], axis=0, out=table[::-1])
        return self._admissible(caps[self._places] - self._places // block * block)

    def _admissible(self, limits: Ints) -> Ints:
        block, rest = self._index.block, limits % self._index.block
        return np.where(limits < block, 0, limits - rest + np.minimum(rest, self._index.longest_tail))

    def take_runs(self) -> None:
        """Longest first, while any place may still hold a run."""
        examined: dict[int, _Run] = {}
        while self._bounds.size:
            at = int(self._bounds.argmax())
            bound = int(self._bounds[at])
            if not bound:
                return
            run = examined.get(at)
            if run is None or run.length != bound:
                collisions = self._collisions
                run = examined[at] = self._examine(at, min(bound, int(self._limits[at])))
                if self._collisions > MAX_COLLISIONS:
                    self.cut_short = True
                    return
                if run.length < bound and self._patience > 0:
                    if self._collisions == collisions:
                        self._learn(at, run.length)
                    self._bounds[at] = run.length
                    continue
            if run.document is None:
                self._bounds[at] = 0
            else:
                self._take(at, bound, run, run.document)

    def _learn(self, at: int, length: int) -> None:
        """The run was shorter than its bound: so it is wherever the same tokens follow, as far as a run may go."""
        block, place, limit = self._index.block, int(self._places[at]), int(self._limits[at])
        refuted = (length // block + 1) * block
        doubtful = self._bounds > length
        if refuted > limit:  # cut by a taken run or the end: says nothing of places with more room
            doubtful &= self._limits <= limit
        others = np.flatnonzero(doubtful)
        self._patience -= _COST_EXAMINE + _COST_BLOCK * (length // block) + others.size
        self.cut_short |= self._patience <= 0
        if refuted <= limit:  # the last block differs mostly: cheaper to see than the whole
            last = np.minimum(self._places[others] + (refuted - block), self._symbols.size - 1)
            alike = self._symbols[last] == self._symbols[place + refuted - block]
            others = others[alike | (self._limits[others] < refuted)]
        widths = np.minimum(self._limits[others], refuted)
        hashes = self._index.hasher.windows(self._prefix, widths, self._places[others])
        same = hashes == self._index.hasher.windows(self._prefix, widths, place)
        self._bounds[others[same]] = length

    def _take(self, at: int, bound: int, run: _Run, document: Document) -> None:
        place = int(self._places[at])
        self.matches.append(Match(document.artifact_id, place, run.doc_start, run.length))
        first, last = np.searchsorted(self._places, (place - bound, place + run.length))
        self._bounds[at:last] = 0
        before = slice(int(first), at)  # no run starts earlier and reaches here: all bounds are <= bound
        np.minimum(self._limits[before], place - self._places[before], out=self._limits[before])
        cut = self._admissible(self._limits[before])
        np.minimum(self._bounds[before], cut, out=self._bounds[before])

    def _examine(self, at: int, limit: int) -> _Run:
        """The best run of at most `limit` tokens at one place."""
        place = int(self._places[at])
        best = _Run(0)
        for segment, lows, highs in self._intervals:
            low, high = int(lows[at]), int(highs[at])
            if low < high:
                best = max(best, self._examine_segment(segment, place, limit, low, high), key=lambda run: run.merit)
        return best

    def _examine_segment(self, segment: _Memo, place: int, limit: int, low: int, high: int) -> _Run:
        block, depth = self._index.block, 1
        while high - low > 1 and (depth + 1) * block <= limit:
            narrowed = segment.narrow(low, high, depth, self._symbols[place + depth * block])
            if narrowed == (0, 0):
                break
            low, high, depth = *narrowed, depth + 1
        suffix = self._ending_suffix(segment, place, limit, low, high, depth) if high - low > 1 else -1
        document, doc_start = segment.locate(suffix if suffix >= 0 else segment.earliest(low, high))
        same = _common_prefix(self._tokens[place : place + limit], document.tokens[doc_start:])
        ends = same == document.tokens.size - doc_start
        length = same if ends else same // block * block
        if length < depth * block:
            self._collisions += 1
            self._index.counters["match_collisions"] += 1
        return _Run(length, ends, document if length else None, doc_start)

    def _ending_suffix(self, segment: _Memo, place: int, limit: int, low: int, high: int, depth: int) -> int:
        """Among suffixes equal for `depth` blocks, the best that also ends as the request goes on; -1 if none."""
        tails = segment.tails(low, high, depth)
        if not tails.size:
            return -1
        at = place + depth * self._index.block
        lengths = np.arange(1, min(limit - depth * self._index.block, self._index.longest_tail) + 1)
        sought = tail_symbols(self._index.hasher.windows(self._prefix, lengths, at), lengths)[::-1]
        sought = np.append(sought, np.uint64(0))  # longest first, no tail last
        starts = tails.searchsorted(sought)
        for choice in np.flatnonzero(tails[np.minimum(starts, tails.size - 1)] == sought):
            stop = int(tails.searchsorted(sought[choice], side="right"))
            suffix = segment.earliest(low + int(starts[choice]), low + stop)
            if suffix >= 0:
                return suffix
        return -1


def _common_prefix(left: Tokens, right: Tokens) -> int:
    """Leading tokens in common, compared in growing slices."""
    size = min(left.size, right.size)
    done, step = 0, 512
    while done < size:
        equal = left[done : min(done + step, size)] == right[done : min(done + step, size)]
        if not equal.all():
            return done + int(equal.argmin())
        done, step = done + step, step * 4
    return size
