"""Times to first token: paired ratios against recompute, quantiles, and what building has to earn back."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

from eval.names import RECOMPUTE
from eval.report.numbers import amount
from eval.report.sections import Section
from eval.results import Build, Timing
from eval.statistics import Interval, quantile, ratio


@dataclass(frozen=True)
class Speed:
    """One arm's requests; ratios are recompute's time over the arm's, above 1 where the arm is faster. Seconds."""

    n: int
    request: Interval | None  # None of recompute itself, and where no pair is whole
    forward: Interval | None
    request_p50: float
    request_p95: float
    forward_p50: float
    saved_s: float | None  # of a request, median over pairs
    document_tokens: float | None  # of reused documents in a request, mean
    tokens: float  # of the prompt, median


def speeds(section: Section, timings: Iterable[Timing]) -> dict[str, Speed]:
    """Every arm's requests of one state, paired with recompute's."""
    arms: dict[str, dict[Hashable, Timing]] = {}
    for timing in timings:
        arms.setdefault(timing.arm, {})[section.pair(timing)] = timing
    base = arms.get(RECOMPUTE, {})
    return {arm: _speed(arms[arm], base if arm != RECOMPUTE else {}) for arm in section.arms if arm in arms}


def chosen(section: Section, state: str, tool: str = "", dataset: str = "") -> list[Timing]:
    """Timings of a state, of one tool and data set where these are given."""
    return [
        timing
        for timing in section.timings
        if timing.state == state
        and (not tool or section.tools[timing.run] == tool)
        and (not dataset or timing.dataset == dataset)
    ]


def by_length(timings: Iterable[Timing]) -> dict[int, list[Timing]]:
    """Timings by the power of two that is nearest to the prompt's length, shortest first."""
    found: dict[int, list[Timing]] = {}
    for timing in timings:
        found.setdefault(2 ** round(log2(max(timing.prompt_tokens, 1))), []).append(timing)
    return dict(sorted(found.items()))


def build_seconds_a_token(builds: Iterable[Build]) -> float | None:
    """Wall clock of building one token; None where every document was found."""
    seconds = tokens = 0.0
    for build in builds:
        if 0 <= build.found < build.documents:
            seconds += build.seconds
            tokens += build.tokens * (build.documents - build.found) / build.documents
    return seconds / tokens if tokens else None


def break_even(speed: Speed, a_token: float | None) -> float | None:
    """How many requests over the same documents pay for building them; infinite where none does."""
    if a_token is None or speed.saved_s is None or speed.document_tokens is None:
        return None
    return a_token * speed.document_tokens / speed.saved_s if speed.saved_s > 0 else float("inf")


def _speed(arm: dict[Hashable, Timing], base: dict[Hashable, Timing]) -> Speed:
    both = [(base[key], arm[key]) for key in arm if key in base]
    own = list(arm.values())
    request = [timing.ttft_request_s for timing in own]
    saved = [under.ttft_request_s - timing.ttft_request_s for under, timing in both]
    documents = [tokens for timing in own if (tokens := _document_tokens(timing.report)) is not None]
    return Speed(
        n=len(own),
        request=_ratio(both, "ttft_request_s"),
        forward=_ratio(both, "ttft_forward_s"),
        request_p50=quantile(request, 0.5),
        request_p95=quantile(request, 0.95),
        forward_p50=quantile([timing.ttft_forward_s for timing in own], 0.5),
        saved_s=quantile(saved, 0.5) if saved else None,
        document_tokens=sum(documents) / len(documents) if documents else None,
        tokens=quantile([timing.prompt_tokens for timing in own], 0.5),
    )


def _ratio(pairs: Sequence[tuple[Timing, Timing]], field: str) -> Interval | None:
    if not pairs:
        return None
    return ratio([getattr(base, field) for base, _ in pairs], [getattr(timing, field) for _, timing in pairs])


def _document_tokens(report: dict[str, Any]) -> float | None:
    """Tokens of the documents of which a request reused something, by its own report; None where it says nothing."""
    documents = report.get("documents")
    if not isinstance(documents, list):
        return None
    used = [document for document in documents if isinstance(document, dict) and amount(document.get("reused"))]
    return sum(amount(document.get("length")) for document in used) if used else None
