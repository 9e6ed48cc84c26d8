"""Find known documents in a request by token content (DESIGN section 4, rule 1).

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
_COST_BLOCK = 2_000
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
    collided: bool = False

    @property
    def merit(self) -> tuple[int, bool, int]:
        return self.length, self.ends, -self.document.serial if self.document else 0


class _Search:
    """One request against one index. `places` are the tokens where a known block starts, in order."""

    def __init__(self, tokens: Tokens, index: TokenIndex, segments: list[Segment]) -> None:
        self.matches: list[Match] = []
        self._tokens = tokens
        self._index = index
        self._prefix = index.hasher.prefix(tokens)
        self._symbols: Hashes = block_symbols(index.hasher.windows(self._prefix, index.block))
        self._patience = _PATIENCE
        self._collisions = 0
        self._earliest: dict[tuple[Segment, int, int], int] = {}
        places = index.candidates(self._symbols)
        lookups = [segment.lookup(self._symbols[places]) for segment in segments] if places.size else []
        reach = np.max([found[2] for found in lookups], axis=0) if lookups else np.zeros(0, np.int64)
        known = np.flatnonzero(reach)
        self._places = places[known]
        self._intervals = [(segment, low[known], high[known]) for segment, (low, high, _) in zip(segments, lookups)]
        self._limits = tokens.size - self._places  # tokens to the next taken run or the end
        self._bounds = self._upper_bounds(reach[known]) if known.size else reach

    def _upper_bounds(self, reach: Ints) -> Ints:
        """Per place, a length no run there exceeds: its blocks must be places too, and documents end."""
        size, block = self._tokens.size, self._index.block
        rows = -(-size // block)
        tokens_left = size - np.arange(rows * block)
        caps = np.minimum(tokens_left, self._index.longest_tail)
        caps[self._places] = np.minimum(reach, tokens_left[self._places])
        table = caps.reshape(rows, block) + np.arange(0, rows * block, block)[:, None]
        lowest = np.minimum.accumulate(table[::-1], axis=0)[::-1].reshape(-1)
        return self._admissible(lowest[self._places] - self._places // block * block)

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
                run = examined[at] = self._examine(at, min(bound, int(self._limits[at])))
                if self._collisions > _MAX_COLLISIONS:
                    self._index.counters["match_cut_short"] += 1
                    return
                if run.length < bound and self._may_look_elsewhere(run):
                    self._learn(at, run)
                    continue
            if run.document is None:
                self._bounds[at] = 0
            else:
                self._take(at, bound, run, run.document)

    def _may_look_elsewhere(self, run: _Run) -> bool:
        if self._patience <= 0:
            return False
        self._patience -= _COST_EXAMINE + _COST_BLOCK * (run.length // self._index.block) + self._places.size
        if self._patience <= 0:
            self._index.counters["match_cut_short"] += 1
        return True

    def _learn(self, at: int, run: _Run) -> None:
        """The run was shorter than its bound: so it is wherever the same tokens follow."""
        self._bounds[at] = run.length
        width = (run.length // self._index.block + 1) * self._index.block
        place, size = int(self._places[at]), self._tokens.size
        if run.collided or width > self._limits[at]:
            return  # a false hit, or cut by a taken run: says nothing about other places
        others = np.flatnonzero((self._bounds > run.length) & (self._places <= size - width))
        hashes = self._index.hasher.windows(self._prefix, width, self._places[others])
        same = hashes == self._index.hasher.windows(self._prefix, width, place)
        self._bounds[others[same]] = run.length

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

    def _examine_segment(self, segment: Segment, place: int, limit: int, low: int, high: int) -> _Run:
        block, depth = self._index.block, 1
        while high - low > 1 and (depth + 1) * block <= limit:
            narrowed = segment.narrow(low, high, depth, self._symbols[place + depth * block])
            if narrowed == (0, 0):
                break
            low, high, depth = *narrowed, depth + 1
        suffix = int(segment.order[low])
        if high - low > 1:
            suffix = self._ending_suffix(segment, place, limit, low, high, depth)
            if suffix < 0:
                suffix = self._earliest_suffix(segment, low, high)
        slot = int(segment.owners[suffix])
        document = segment.documents[slot]
        doc_start = (suffix - int(segment.firsts[slot])) * block
        same = _common_prefix(self._tokens[place : place + limit], document.tokens[doc_start:])
        ends = same == document.tokens.size - doc_start
        length = same if ends else same // block * block
        collided = length < depth * block
        if collided:
            self._collisions += 1
            self._index.counters["match_collisions"] += 1
        return _Run(length, ends, document if length else None, doc_start, collided)

    def _ending_suffix(self, segment: Segment, place: int, limit: int, low: int, high: int, depth: int) -> int:
        """Among suffixes equal for `depth` blocks, the best that also ends as the request goes on; -1 if none."""
        tails = segment.tails(low, high, depth)
        if not tails.size:
            return -1
        at = place + depth * self._index.block
        lengths = np.arange(1, min(limit - depth * self._index.block, self._index.longest_tail) + 1)
        sought = tail_symbols(self._index.hasher.windows(self._prefix, lengths, at), lengths)[::-1]
        sought = np.append(sought, np.uint64(0))  # longest first, no tail last
        starts, stops = np.searchsorted(tails, sought), np.searchsorted(tails, sought, side="right")
        for choice in np.flatnonzero(starts < stops):
            suffix = self._earliest_suffix(segment, low + int(starts[choice]), low + int(stops[choice]))
            if suffix >= 0:
                return suffix
        return -1

    def _earliest_suffix(self, segment: Segment, low: int, high: int) -> int:
        key = (segment, low, high)
        if key not in self._earliest:
            self._earliest[key] = segment.earliest(low, high)
        return self._earliest[key]

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
                if place < cursor or self._collisions > _MAX_COLLISIONS:
                    continue
                before = self._index.counters["match_collisions"]
                document = _whole_document(content, int(hashes[place]), self._index)
                self._collisions += self._index.counters["match_collisions"] - before
                if document is not None:
                    self.matches.append(Match(document.artifact_id, int(place), 0, length))
                    cursor = int(place) + length
                    taken[place:cursor] = True
