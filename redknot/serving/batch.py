"""What a server and its engine say to each other: a request's wish, its admission, and the rows of one forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from redknot.errors import InputError
from redknot.plan.planner import Span
from redknot.runtime.request import REUSE_MODES

_ASK_KEYS = ("reuse", "profile", "spans")
_SPAN_KEYS = ("start", "end", "artifact_id")


@dataclass(frozen=True)
class Ask:
    """What a client wants of one request; by default its documents are found and reused."""

    reuse: str = "auto"
    profile: str | None = None  # a shipped one by name; None: the server's
    spans: tuple[Span, ...] | None = None

    @classmethod
    def parse(cls, given: object) -> Ask:
        """Read ``custom_params["redknot"]`` (None where there is none); InputError names what is wrong with it."""
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise InputError(f"redknot must be an object, not {type(given).__name__}")
        unknown = sorted(str(key) for key in given if key not in _ASK_KEYS)
        if unknown:
            raise InputError(f"redknot has no field {', '.join(unknown)}; known are {', '.join(_ASK_KEYS)}")
        reuse, profile = given.get("reuse", "auto"), given.get("profile")
        if reuse not in REUSE_MODES:
            raise InputError(f"redknot.reuse must be one of {', '.join(REUSE_MODES)}, not {reuse!r}")
        if profile is not None and not isinstance(profile, str):
            raise InputError("redknot.profile must be the name of a profile")
        return cls(reuse, profile, _spans(given.get("spans")))


def _spans(given: object) -> tuple[Span, ...] | None:
    if given is None:
        return None
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InputError("redknot.spans must be a list of spans")
    return tuple(_span(number, span) for number, span in enumerate(given))


def _span(number: int, given: Any) -> Span:
    """[start, end), or an object that may name the artifact; bounds are checked when the prompt's length is known."""
    wanted = f"redknot.spans[{number}] must be [start, end] or an object with {', '.join(_SPAN_KEYS)}"
    if isinstance(given, Mapping):
        if set(given) - set(_SPAN_KEYS):
            raise InputError(wanted)
        start, end, artifact_id = (given.get(key) for key in _SPAN_KEYS)
    elif isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 2:
        start, end, artifact_id = given[0], given[1], None
    else:
        raise InputError(wanted)
    if not isinstance(start, int) or not isinstance(end, int) or not isinstance(artifact_id, str | None):
        raise InputError(wanted)
    return Span(start, end, artifact_id)


@dataclass(frozen=True, eq=False)
class Admission:
    """What the server must know before it schedules a request; it stands for this request and no other."""

    extra_key: str | None  # the branch of the prefix cache that its pages belong to; None: the exact one
    reuses: bool = False  # rows of it may come from artifacts
    reason: str | None = None  # why they do not
    detail: str = ""


# Pages of the longest prefix of the request that the prefix cache holds now under an extra key, in order.
CachedPages = Callable[[str | None], Sequence[int]]


def nothing_cached(_: str | None) -> Sequence[int]:
    """A server without a prefix cache."""
    return ()


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of one request in one forward; what is before is in its pages."""

    request_id: str
    start: int
    stop: int
    token_ids: Tensor  # [stop - start] int64, of these rows
    known: Sequence[int]  # ids of the whole request as far as it will be prefilled
    pages: Sequence[int]  # pages of [0, stop), in order
    final: bool  # logits of its last row are wanted: the end of a prefill, or a decode step


@dataclass(frozen=True)
class Outcome:
    """What a forward left."""

    logits: Tensor  # float32 [pieces, vocab]; zero where they are not wanted
    failures: Mapping[str, str]  # request id -> what went wrong; the others are as good as without it
    reports: Mapping[str, dict[str, Any]]  # request id -> report, with the piece that ends its prefill
