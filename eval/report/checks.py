"""What does not count: arms with unequal tokens or output caps, reuse that ran dense, figures that are none.

The harness rejects these itself; files may come from elsewhere, so the report looks again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

from eval.names import NO_DOCUMENTS, NOISE_FLOOR, RECOMPUTE
from eval.results import Answer, Fidelity, Load, Rejected, Timing

FIXED = (RECOMPUTE, NO_DOCUMENTS, NOISE_FLOOR)  # mean the same whatever else a profile may say

UNEQUAL_TOKENS = "the arms did not get the same tokens"
UNEQUAL_CAPS = "the arms had different output caps"
NOT_A_SCORE = "the score is not between 0 and 1"
NOT_A_DIVERGENCE = "an error or divergence is not a number of at least 0"
NOT_A_SHARE = "the top-1 agreement is not between 0 and 1"
NOT_A_TIME = "a time is not a positive number"
RAN_DENSE = "the reuse arm ran dense"

T = TypeVar("T", Answer, Timing, Fidelity, Load)
Key = Callable[[T], Hashable]
Profiles = Mapping[str, Mapping[str, Any]]  # of each arm


def checked_answers(
    answers: Iterable[Answer], profiles: Profiles, item: Key[Answer]
) -> tuple[list[Answer], list[Rejected]]:
    """The answers that count, and the others with their reason; ``item`` is what the arms share."""
    good, bad = sift(answers, lambda answer: _wrong_answer(answer, profiles))
    capped = unequal(good, item, lambda answer: answer.max_new_tokens)
    good, unfair = sift(good, lambda answer: UNEQUAL_CAPS if item(answer) in capped else "")
    same = [answer for answer in good if answer.arm != NO_DOCUMENTS]
    differ = unequal(same, item, lambda answer: answer.prompt_sha256)
    good, other = sift(good, lambda answer: UNEQUAL_TOKENS if item(answer) in differ else "")
    return good, [*bad, *unfair, *other]


def checked_timings(
    timings: Iterable[Timing], profiles: Profiles, pair: Key[Timing]
) -> tuple[list[Timing], list[Rejected]]:
    """As ``checked_answers``; ``pair`` is what requests share that ran one behind the other."""
    good, bad = sift(timings, lambda timing: _wrong_timing(timing, profiles))
    differ = unequal(good, pair, lambda timing: timing.prompt_sha256)
    good, other = sift(good, lambda timing: UNEQUAL_TOKENS if pair(timing) in differ else "")
    return good, bad + other


def checked_fidelity(found: Iterable[Fidelity]) -> tuple[list[Fidelity], list[Rejected]]:
    """As ``checked_answers``."""
    return sift(found, _wrong_fidelity)


def checked_loads(loads: Iterable[Load], profiles: Profiles) -> tuple[list[Load], list[Rejected]]:
    """As ``checked_answers``; requests that failed stay: the server's errors are a result."""
    return sift(loads, lambda load: "" if load.error else _wrong_load(load, profiles))


def sift(records: Iterable[T], wrong: Callable[[T], str]) -> tuple[list[T], list[Rejected]]:
    """Records without a reason against them, and the reasons of the others."""
    good: list[T] = []
    bad: list[Rejected] = []
    for record in records:
        if reason := wrong(record):
            item = str(record.number) if isinstance(record, Load) else record.item
            bad.append(Rejected(run=record.run, dataset=record.dataset, item=item, arm=record.arm, reason=reason))
        else:
            good.append(record)
    return good, bad


def unequal(records: Iterable[T], key: Key[T], value: Callable[[T], Any]) -> set[Hashable]:
    """The keys whose records have more than one value."""
    first: dict[Hashable, Any] = {}
    return {of for record in records if first.setdefault(of := key(record), value(record)) != value(record)}


def _wrong_answer(answer: Answer, profiles: Profiles) -> str:
    if not 0 <= answer.score <= 1:
        return NOT_A_SCORE
    if answer.kl is not None and not _amount(answer.kl):
        return NOT_A_DIVERGENCE
    return _dense(answer, profiles)


def _wrong_timing(timing: Timing, profiles: Profiles) -> str:
    if not (_positive(timing.ttft_request_s) and _positive(timing.ttft_forward_s)):
        return NOT_A_TIME
    return _dense(timing, profiles)


def _wrong_fidelity(found: Fidelity) -> str:
    if not all(_amount(value) for value in (*found.layers, found.kl)):
        return NOT_A_DIVERGENCE
    return "" if 0 <= found.top1 <= 1 else NOT_A_SHARE


def _wrong_load(load: Load, profiles: Profiles) -> str:
    if not (_positive(load.ttft_s) and _positive(load.latency_s)):
        return NOT_A_TIME
    return _dense(load, profiles)


def _dense(record: Answer | Timing | Load, profiles: Profiles) -> str:
    """Why a record of a profile that reuses does not count: its own report says that nothing was reused."""
    reuses = profiles.get(record.arm, {}).get("middle_idle", "full") != "full"
    return RAN_DENSE if reuses and record.report.get("arm") == "dense" else ""


def _positive(value: float) -> bool:
    return 0 < value < math.inf


def _amount(value: float) -> bool:
    """Divergences may come out below zero by rounding."""
    return -1e-6 < value < math.inf
