"""What a client may ask for, checked before anything runs: token ids, and the documents it points out among them."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from operator import index as as_int

from redknot.errors import InputError
from redknot.model.geometry import Geometry
from redknot.model.tokenizer import Tokenizer
from redknot.plan.planner import Span

REUSE_MODES = ("auto", "off", "required")
Text = str | Sequence[int]


def read_request(
    tokenizer: Tokenizer,
    geometry: Geometry,
    prompt: str | None,
    token_ids: Sequence[int] | None,
    segments: Sequence[Text] | None,
    spans: Sequence[Span | tuple[int, int]] | None,
    room: int,
) -> tuple[list[int], list[Span] | None]:
    """Token ids of a request that has room for ``room`` new ones, and its documents, None when they are to be found.

    InputError names what is wrong. A request is never cut.
    """
    if sum(given is not None for given in (prompt, token_ids, segments)) != 1:
        raise InputError("give exactly one of prompt, token_ids and segments")
    if spans is not None and token_ids is None:
        raise InputError("spans count positions of token_ids; give token_ids, or segments without spans")
    if token_ids is not None:
        return read_ids(geometry, token_ids, spans, room)
    found: list[Span] | None = None
    bos = [] if geometry.bos_token_id is None else [geometry.bos_token_id]
    if segments is not None:
        ids, found = _join(segments, tokenizer, geometry, bos)
    else:
        ids = [*bos, *_encode(prompt, "prompt", tokenizer, geometry)]
    _check_ids(ids, geometry, room)
    return ids, found


def read_ids(
    geometry: Geometry, token_ids: Sequence[int], spans: Sequence[Span | tuple[int, int]] | None, room: int
) -> tuple[list[int], list[Span] | None]:
    """As ``read_request``, of a request that is given as token ids."""
    ids = _plain(token_ids, "token_ids")
    found = None if spans is None else _checked(spans, len(ids))
    _check_ids(ids, geometry, room)
    return ids, found


def read_length(max_new_tokens: int) -> int:
    """How many tokens may be generated; InputError unless it is a whole number of at least 1."""
    try:
        length = as_int(max_new_tokens)
    except TypeError:
        length = 0
    if length < 1:
        raise InputError(f"max_new_tokens must be a whole number of at least 1, not {_shown(max_new_tokens)}")
    return length


def _join(
    segments: Sequence[Text], tokenizer: Tokenizer, geometry: Geometry, bos: list[int]
) -> tuple[list[int], list[Span] | None]:
    """BOS and the segments' ids; every segment but the last is a document, an only one may hold some."""
    if isinstance(segments, str | bytes) or not isinstance(segments, Sequence):
        found = "one text" if isinstance(segments, str) else type(segments).__name__
        raise InputError(f"segments must be a list of texts or of token id lists, not {found}")
    ids, spans = list(bos), []
    for number, segment in enumerate(segments):
        text, what = isinstance(segment, str), f"segment {number}"
        part = _encode(segment, what, tokenizer, geometry) if isinstance(segment, str) else _plain(segment, what)
        if not text and bos and bos[0] in part:
            raise InputError(f"segment {number} holds the BOS token {bos[0]}; it is put in front of the request, once")
        if part and number + 1 < len(segments):
            spans.append(Span(len(ids), len(ids) + len(part)))
        ids += part
    return ids, spans if len(segments) > 1 else None


def _encode(text: object, what: str, tokenizer: Tokenizer, geometry: Geometry) -> list[int]:
    """Ids of a text; one that cannot fit the model is refused before it is encoded."""
    if not isinstance(text, str):
        raise InputError(f"{what} must be a text, not {type(text).__name__}")
    if tokenizer.exceeds(text, geometry.max_positions):
        limit = geometry.max_positions
        raise InputError(f"{what} has more than {limit} tokens, the model has {limit} positions")
    ids: list[int] = tokenizer.encode(text).tolist()
    return ids


def _plain(ids: Iterable[int], what: str) -> list[int]:
    try:
        if isinstance(ids, bytes | bytearray):  # their items are integers, but hardly meant as token ids
            raise TypeError
        return [as_int(token) for token in ids]
    except TypeError:
        raise InputError(f"{what} must be a list of integers, found {_shown(ids)}") from None


def _shown(value: object) -> str:
    """A short form of what a client gave, on one line."""
    return " ".join(reprlib.repr(value).split())


def _checked(spans: Sequence[Span | tuple[int, int]], total: int) -> list[Span]:
    """Spans in order, none empty, none outside the request, none overlapping."""
    checked: list[Span] = []
    if not isinstance(spans, Iterable):
        raise InputError(f"spans must be a list of Spans or pairs of integers, found {_shown(spans)}")
    for number, given in enumerate(spans):
        try:
            start, end = (given.start, given.end) if isinstance(given, Span) else given
            span = Span(as_int(start), as_int(end), given.artifact_id if isinstance(given, Span) else None)
        except (TypeError, ValueError):
            raise InputError(f"span {number} must be a Span or a pair of integers, found {_shown(given)}") from None
        if not 0 <= span.start < span.end <= total:
            raise InputError(
                f"span {number} is [{span.start}, {span.end}); supported: 0 <= start < end <= {total} tokens"
            )
        last = checked[-1].end if checked else 0
        if span.start < last:
            raise InputError(f"span {number} starts at {span.start}, inside the one before, which ends at {last}")
        checked.append(span)
    return checked


def _check_ids(ids: list[int], geometry: Geometry, room: int) -> None:
    if not ids:
        raise InputError("the request is empty; give at least one token")
    if min(ids) < 0 or max(ids) >= geometry.vocab_size:
        raise InputError(f"token ids must be in [0, {geometry.vocab_size}), found {min(ids)}..{max(ids)}")
    if len(ids) + room > geometry.max_positions:
        raise InputError(
            f"{len(ids)} prompt tokens and {room} new ones exceed the model's {geometry.max_positions} positions"
        )
