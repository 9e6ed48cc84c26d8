"""Records that may stand in one table: those of one checkpoint, engine and tensor parallelism, the latest of each."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any

from eval.names import NO_DOCUMENTS, NOISE_FLOOR, RECOMPUTE, TIMING_REJECTED
from eval.report.checks import FIXED, checked_answers, checked_fidelity, checked_loads, checked_timings
from eval.results import Answer, Build, Fidelity, Load, Record, Rejected, Run, Timing

Runs = Sequence[tuple[Run, Sequence[Record]]]


@dataclass(frozen=True)
class Section:
    """What counts of some runs, each in the order in which it was first seen; arms carry the labels of ``arms``."""

    runs: tuple[Run, ...]
    arms: dict[str, dict[str, Any]]  # label -> profile, {} of what has none
    answers: tuple[Answer, ...]
    timings: tuple[Timing, ...]  # without warm-up
    fidelity: tuple[Fidelity, ...]
    loads: tuple[Load, ...]
    builds: tuple[Build, ...]
    rejected: tuple[Rejected, ...]

    @property
    def model(self) -> str:
        """The checkpoint's name without its folder."""
        return PurePath(self.runs[0].model.get("name", "")).name or "unnamed model"

    @cached_property
    def tools(self) -> dict[str, str]:
        """The tool of each run."""
        return {run.run: run.tool for run in self.runs}

    @cached_property
    def _keys(self) -> Keys:
        return Keys(self.runs)

    def item(self, record: Answer | Timing | Fidelity) -> Hashable:
        """What the arms of an item share."""
        return self._keys.item(record)

    def pair(self, timing: Timing) -> Hashable:
        """What the arms of a pair share."""
        return self._keys.pair(timing)


def sections(runs: Runs) -> list[Section]:
    """One section for each combination of model (its hashes), engine and tensor parallelism."""
    groups: dict[str, list[tuple[Run, Sequence[Record]]]] = {}
    for run, records in runs:
        hashes = {key: value for key, value in run.model.items() if key != "name"} or run.model
        groups.setdefault(json.dumps([hashes, run.engine, run.tp], sort_keys=True), []).append((run, records))
    return [_section(group) for group in groups.values()]


def _section(group: Runs) -> Section:
    runs = tuple(run for run, _ in group)
    labels = _labels(runs)
    latest = _Latest(runs)
    for _, records in group:
        for record in records:
            latest.add(_labelled(record, labels))
    arms = _arms(runs, labels, latest)
    answers, unfair = checked_answers(latest.answers.values(), arms, latest.keys.item)
    timings, slow = checked_timings(latest.pairs(), arms, latest.keys.pair)
    fidelity, odd = checked_fidelity(latest.fidelity.values())
    loads, lost = checked_loads(latest.loads.values(), arms)
    return Section(
        runs=runs,
        arms=arms,
        answers=tuple(answers),
        timings=tuple(timings),
        fidelity=tuple(fidelity),
        loads=tuple(loads),
        builds=tuple(latest.builds),
        rejected=(*latest.rejected, *unfair, *slow, *odd, *lost),
    )


class Keys:
    """What records share that are compared with each other. Runs of one tool and seed are one run that went on."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.of = {run.run: _signature(run) for run in runs}

    def item(self, record: Answer | Timing | Fidelity | Rejected) -> Hashable:
        """What the arms of an item share."""
        return self.of[record.run], record.dataset, record.item

    def pair(self, timing: Timing) -> Hashable:
        """What the arms of a pair share: they ran one behind the other, so in one run."""
        return self.item(timing), timing.run, timing.pair, timing.state


class _Latest:
    """The latest record of each key."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.keys = Keys(runs)
        self.answers: dict[Hashable, Answer] = {}
        self.timings: dict[Hashable, Timing] = {}
        self.fidelity: dict[Hashable, Fidelity] = {}
        self.loads: dict[Hashable, Load] = {}
        self.builds: dict[Build, None] = {}
        self._timed_by: dict[Hashable, str] = {}  # the last run that timed an arm of an item
        self._rejected: dict[Hashable, dict[Rejected, None]] = {}

    @property
    def rejected(self) -> list[Rejected]:
        """What was rejected and not measured by a later run."""
        return [record for found in self._rejected.values() for record in found]

    def add(self, record: Record) -> None:
        """Take a record, later ones last."""
        if isinstance(record, Answer):
            self._measured(record, "answer")
            self.answers[self.keys.item(record), record.arm] = record
        elif isinstance(record, Rejected):
            kind = "timing" if record.reason.startswith(TIMING_REJECTED) else "answer"
            self._rejected.setdefault((self.keys.item(record), record.arm, kind), {})[record] = None
            if kind == "answer":
                self.answers.pop((self.keys.item(record), record.arm), None)
        elif isinstance(record, Timing):
            self._measured(record, "timing")
            self._timed_by[self.keys.item(record), record.arm, record.state] = record.run
            self.timings[self.keys.pair(record), record.warmup, record.arm] = record
        elif isinstance(record, Fidelity):
            self.fidelity[self.keys.item(record), record.arm] = record
        elif isinstance(record, Load):
            where = record.dataset, record.loop, record.level, record.round, record.number
            self.loads[self.keys.of[record.run], where, record.arm] = record
        elif isinstance(record, Build):
            self.builds[record] = None

    def pairs(self) -> list[Timing]:
        """Measured requests of the last run that timed an arm of an item; those of recompute stay with their arms."""
        groups: dict[Hashable, list[Timing]] = {}
        for timing in self.timings.values():
            if not timing.warmup:
                groups.setdefault(self.keys.pair(timing), []).append(timing)
        kept: list[Timing] = []
        for group in groups.values():
            arms = [timing for timing in group if timing.arm != RECOMPUTE] or group
            last = {t.arm for t in arms if self._timed_by[self.keys.item(t), t.arm, t.state] == t.run}
            kept += [timing for timing in group if timing.arm in last or (last and timing.arm == RECOMPUTE)]
        return kept

    def _measured(self, record: Answer | Timing, kind: str) -> None:
        """What an earlier run rejected and this one measured is no longer rejected."""
        rejected = self._rejected.get((self.keys.item(record), record.arm, kind), {})
        for earlier in [earlier for earlier in rejected if earlier.run != record.run]:
            del rejected[earlier]


def _signature(run: Run) -> str:
    """What makes two runs ask the same questions: the tool and its seeds. More items are more of the same run."""
    seeds = {name: value for name, value in run.options.items() if name.startswith("seed")}
    return json.dumps([run.tool, seeds], sort_keys=True)


def _labels(runs: Iterable[Run]) -> dict[tuple[str, str], str]:
    """The label of each (run, arm): the arm's name, and its digest where another run's profile of this name differs."""
    digests: dict[str, set[str]] = {}
    for run in runs:
        for arm in run.arms:
            digests.setdefault(arm, set()).add(run.digests.get(arm, ""))
    return {
        (run.run, arm): arm
        if len(digests[arm]) == 1 or arm in FIXED
        else f"{arm} {run.digests.get(arm, '')[:8]}".strip()
        for run in runs
        for arm in run.arms
    }


def _labelled(record: Record, labels: dict[tuple[str, str], str]) -> Record:
    arm = getattr(record, "arm", None)
    label = labels.get((getattr(record, "run", ""), arm or ""), arm)
    return record if label == arm else record.model_copy(update={"arm": label})


def _arms(runs: Iterable[Run], labels: dict[tuple[str, str], str], latest: _Latest) -> dict[str, dict[str, Any]]:
    """Every arm that was run or measured: recompute, the others as they were named, and what is no arm of reuse."""
    found = {labels[run.run, arm]: profile for run in runs for arm, profile in run.arms.items()}
    for records in (latest.answers, latest.timings, latest.fidelity, latest.loads):
        for record in records.values():
            found.setdefault(record.arm, {})
    order = {RECOMPUTE: 0, NOISE_FLOOR: 2, NO_DOCUMENTS: 3}
    return dict(sorted(found.items(), key=lambda arm: order.get(arm[0], 1)))
