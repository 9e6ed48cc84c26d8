"""What a folder's results come to, in a few lines; the report is made elsewhere, from the same records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eval.names import NO_DOCUMENTS, RECOMPUTE, is_informative
from eval.results import Answer, Record, Rejected, Run, Timing
from redknot.cli.common import table


@dataclass(frozen=True)
class Line:
    """One arm on one data set; None where nothing was measured."""

    dataset: str
    arm: str
    n: int
    score: float | None  # mean, 0 to 1
    kl: float | None  # mean, nats
    ttft_ratio: float | None  # recompute / arm of requests over documents read before, median of pairs
    rejected: int
    informative: bool | None  # the data set: whether the documents matter to recompute


def summary(records: Sequence[Record], tool: str) -> list[Line]:
    """Every data set of a tool, in the order of its records, and every arm, in the order of its runs."""
    runs = {one.run: one for one in records if isinstance(one, Run) and one.tool == tool}
    arms = dict.fromkeys([*(arm for run in runs.values() for arm in run.arms), NO_DOCUMENTS])
    found: dict[str, list[Answer | Timing | Rejected]] = {}
    for one in records:
        if isinstance(one, Answer | Timing | Rejected) and one.run in runs:
            found.setdefault(one.dataset, []).append(one)
    return [
        _line(dataset, arm, of_set)
        for dataset, of_set in found.items()
        for arm in arms
        if any(one.arm == arm for one in of_set)
    ]


def _line(dataset: str, arm: str, records: Sequence[Answer | Timing | Rejected]) -> Line:
    answers = [one for one in records if isinstance(one, Answer) and one.arm == arm]
    ratios = _ratios([one for one in records if isinstance(one, Timing) and one.state == "hot"], arm)
    return Line(
        dataset=dataset,
        arm=arm,
        n=len(answers),
        score=_mean([one.score for one in answers]),
        kl=_mean([one.kl for one in answers if one.kl is not None]),
        ttft_ratio=float(np.median(ratios)) if ratios else None,
        rejected=sum(isinstance(one, Rejected) and one.arm == arm for one in records),
        informative=_informative(records),
    )


def _ratios(timings: Sequence[Timing], arm: str) -> list[float]:
    pairs: dict[tuple[str, str, int], dict[str, float]] = {}
    for one in timings:
        if not one.warmup and one.state == "hot":
            pairs.setdefault((one.run, one.item, one.pair), {})[one.arm] = one.ttft_request_s
    return [pair[RECOMPUTE] / pair[arm] for pair in pairs.values() if pair.keys() == {RECOMPUTE, arm}]


def _informative(records: Sequence[Answer | Timing | Rejected]) -> bool | None:
    with_documents, without = (
        _mean([one.score for one in records if isinstance(one, Answer) and one.arm == arm])
        for arm in (RECOMPUTE, NO_DOCUMENTS)
    )
    if with_documents is None or without is None:
        return None
    return is_informative(with_documents, without)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def as_text(lines: Sequence[Line]) -> str:
    """A table, and a line for each data set that tells nothing."""
    rows = [
        (one.dataset, one.arm, one.n, _shown(one.score), _shown(one.kl), _shown(one.ttft_ratio, 2), one.rejected or "")
        for one in lines
    ]
    text = table(("DATA SET", "ARM", "N", "SCORE", "KL", "TTFT RATIO", "REJECTED"), rows, right=range(2, 7))
    silent = dict.fromkeys(one.dataset for one in lines if one.informative is False)
    return "\n".join(
        [text, *(f"{name}: not informative, documents are worth less than 10 points to recompute" for name in silent)]
    )


def _shown(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"
