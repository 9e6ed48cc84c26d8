"""Find known documents in a request by token content, never by name.

A *run* is a stretch of request tokens equal to a stretch of a document that starts on one of the document's block
boundaries and either is a whole number of blocks or reaches the document's end. What is found:

1. The longest run anywhere in the request is taken; among equals the leftmost, then one that reaches its document's
   end, then the earliest added document, then the lowest place in it.
2. The stretches left and right of it are searched the same way; no run crosses into a taken one.

Documents shorter than a block are never found. How runs are searched, and at what cost: `redknot.plan.search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_int
from typing import Any

import numpy as np
import numpy.typing as npt

from redknot.errors import InputError
from redknot.plan.hashing import Tokens, check_token_ids
from redknot.plan.search import MAX_COLLISIONS, Match, Search
from redknot.plan.suffixes import Document
from redknot.plan.token_index import TokenIndex


def match_tokens(tokens: npt.NDArray[Any], index: TokenIndex) -> tuple[Match, ...]:
    """Known documents in `tokens`, in request order, never overlapping."""
    checked = check_token_ids(tokens)
    segments = index.segments()
    if not checked.size or not len(index):
        return ()
    search = Search(checked, index, segments)
    search.take_runs()
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
    for document in index.whole(content.size).get(content_hash, ())[:MAX_COLLISIONS]:
        if np.array_equal(document.tokens, content):
            return document
        index.counters["match_collisions"] += 1
    return None
