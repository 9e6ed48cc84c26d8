"""Find known documents in a request by token content, never by name.

A *run* is a stretch of request tokens equal to a stretch of a document that starts on one of the document's block
boundaries and either is a whole number of blocks or reaches the document's end. What is found:

1. The longest run anywhere in the request is taken; among equals the leftmost, then one that reaches its document's
   end, then the earliest added document, then the lowest place in it.
2. The stretches left and right of it are searched the same way; no run crosses into a taken one.

Documents shorter than a block (where the index admits them) count as runs when whole.

Cost. Rolling hashes propose places, a suffix array proposes documents, tokens are compared at the end, so a content
that merely collides is a miss and counted. An upper bound on the run at every place lets most places go
unexamined; a place whose bound was too high costs one examination, and all places with the same content learn
from it. Such failures are paid from `_PATIENCE`: once it is spent (adversarial inputs only), runs are taken
where the bound is highest without proof that none is longer, and "match_cut_short" is counted. After
`_MAX_COLLISIONS` false hits a search stops and the rest is new text. So a search of n tokens examines
at most n / block places plus a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import index as as_int
from typing import Any

import numpy as np
import numpy.typing as npt

from redknot.errors import InputError
from redknot.plan.token_index import (
    Document,
    Hashes,
    Ints,
    Segment,
    TokenIndex,
    Tokens,
    block_symbols,
    check_token_ids,
    tail_symbols,
)

_PATIENCE = 4_000_000  # in units of roughly 5 ns
_COST_EXAMINE = 10_000
_COST_BLOCK = 500
_MAX_COLLISIONS = 256


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


def match_tokens(tokens: npt.NDArray[Any], index: TokenIndex) -> tuple[Match, ...]:
    """Known documents in `tokens`, in request order, never overlapping."""
    checked = check_token_ids(tokens)
    segments = index.segments()
    if not checked.size or not len(index):
        return ()
    search = _Search(checked, index, segments)
    search.take_runs()
    search.take_short_documents()
    index.counters["match_cut_short"] += search.cut_short
    return tuple(sorted(search.matches, key=lambda match: match.start))


def match_spans(tokens: npt.NDArray[Any], spans: Sequence[tuple[int, int]], index: TokenIndex) -> tuple[Match, ...]:
    """Known documents inside the client's spans [start, end): the whole span as one document, else runs within it."""
    checked = check_token_ids(tokens)
    prefix = index.hasher.prefix(checked)
    matches: list[Match] = []
    for start, end in _checked_spans(spans, checked.size):
        content = checked[start:end]
        document = _whole_document(content, int(index.hasher.windows(prefix, end - start, start)[0]), index)
        if document is not None:
            matches.append(Match(document.artifact_id, start, 0, end - start))
        else:
            matches.extend(
                Match(match.artifact_id, match.start + start, match.doc_start, match.length)
                for match in match_tokens(content, index)
            )
    return tuple(matches)


def _checked_spans(spans: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    checked: list[tuple[int, int]] = []
    previous = 0
    for number, span in enumerate(spans):
        try:
            start, end = (as_int(bound) for bound in span)
        except (TypeError, ValueError):
            raise InputError(f"span {number} must be a pair of integers (start, end), found {span!r}") from None
        if not 0 <= start < end <= size:
            raise InputError(f"span {number} is ({start}, {end}); supported: 0 <= start < end <= {size} tokens")
        if start < previous:
            raise InputError(f"span {number} starts at {start}, before the end {previous} of the span before it")
        checked.append((start, end))
        previous = end
    return checked


def _whole_document(content: Tokens, content_hash: int, index: TokenIndex) -> Document | None:
    for document in index.whole(content.size).get(content_hash, ())[:_MAX_COLLISIONS]:
        if np.array_equal(document.tokens, content):
            return document
        index.counters["match_collisions"] += 1
    return None


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


class _Search:
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
                if self._collisions > _MAX_COLLISIONS:
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

    def take_short_documents(self) -> None:
        """Whole documents shorter than a block, in what the runs left over: one pass per distinct length."""
        taken = np.zeros(self._tokens.size, bool)
        for match in self.matches:
            taken[match.start : match.end] = True
        for length in self._index.short_lengths():
            hashes = self._index.hasher.windows(self._prefix, length)
            known = np.fromiter(self._index.whole(length), np.uint64)
            sums = np.concatenate([[0], np.cumsum(taken)])
            cursor = 0
            for place in np.flatnonzero(np.isin(hashes, known) & (sums[length:] == sums[:-length])):
                content = self._tokens[place : place + length]
                if place < cursor:
                    continue
                if self._collisions > _MAX_COLLISIONS:
                    self.cut_short = True
                    return
                before = self._index.counters["match_collisions"]
                document = _whole_document(content, int(hashes[place]), self._index)
                self._collisions += self._index.counters["match_collisions"] - before
                if document is not None:
                    self.matches.append(Match(document.artifact_id, int(place), 0, length))
                    cursor = int(place) + length
                    taken[place:cursor] = True
