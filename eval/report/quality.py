"""Scores of arms: means over items, intervals clustered by context, paired differences against recompute."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from eval.names import NO_DOCUMENTS, RECOMPUTE, is_informative
from eval.report.sections import Section
from eval.results import Answer
from eval.statistics import Drawn, Interval, averaged, drawn_mean

Answers = Mapping[Hashable, Answer]  # of one arm, by item


@dataclass(frozen=True)
class Quality:
    """One arm on one data set, or the mean over data sets; scores and shares are 0 to 1, KL in nats."""

    score: Drawn
    difference: Drawn | None  # to recompute (or another arm), over the items that both answered
    kl: Drawn | None
    top1: Drawn | None
    cut: int  # prompts whose middle was cut out


@dataclass(frozen=True)
class DataSet:
    """All arms on one data set."""

    name: str
    arms: dict[str, Quality]  # by label

    @property
    def informative(self) -> bool | None:
        """Whether recompute needs the documents here; None where nothing was asked without them."""
        if RECOMPUTE not in self.arms or NO_DOCUMENTS not in self.arms:
            return None
        return is_informative(self.arms[RECOMPUTE].score.value, self.arms[NO_DOCUMENTS].score.value)


def data_sets(section: Section, tool: str, against: str = RECOMPUTE) -> list[DataSet]:
    """What one tool asked, data sets in the order of their names; differences are to the arm ``against``."""
    found: dict[str, dict[str, dict[Hashable, Answer]]] = {}
    for answer in section.answers:
        if section.tools[answer.run] == tool:
            found.setdefault(answer.dataset, {}).setdefault(answer.arm, {})[section.item(answer)] = answer
    return [
        DataSet(
            name,
            {
                arm: _quality(arms[arm], arms.get(against, {}) if arm != against else {})
                for arm in section.arms
                if arm in arms
            },
        )
        for name, arms in sorted(found.items())
    ]


def overall(sets: Sequence[DataSet]) -> dict[str, Quality]:
    """Each arm's mean over data sets, which weigh the same; an arm that lacks one of them has none."""
    arms = [arm for arm in (sets[0].arms if sets else {}) if all(arm in of.arms for of in sets)]
    return {arm: _averaged([of.arms[arm] for of in sets]) for arm in arms}


def counted(sets: Sequence[DataSet]) -> list[DataSet]:
    """The data sets that decide: all but those known not to need the documents; all where none is left."""
    return [of for of in sets if of.informative is not False] or list(sets)


def share(drawn: Drawn | None) -> Interval | None:
    """The interval of a score or an agreement, where there is one."""
    return None if drawn is None else drawn.interval((0.0, 1.0))


def change(drawn: Drawn | None) -> Interval | None:
    """The interval of a difference of scores, where there is one."""
    return None if drawn is None else drawn.interval((-1.0, 1.0))


def _quality(answers: Answers, base: Answers) -> Quality:
    items = list(answers.values())
    both = [key for key in answers if key in base]
    return Quality(
        score=drawn_mean([answer.score for answer in items], _clusters(items)),
        difference=_mean([answers[key] for key in both], [answers[key].score - base[key].score for key in both]),
        kl=_recorded(items, lambda answer: answer.kl),
        top1=_recorded(items, lambda answer: answer.top1),
        cut=sum(answer.cut for answer in items),
    )


def _recorded(answers: Sequence[Answer], field: Callable[[Answer], float | None]) -> Drawn | None:
    having = [answer for answer in answers if field(answer) is not None]
    return _mean(having, [float(field(answer) or 0) for answer in having])


def _mean(answers: Sequence[Answer], values: Sequence[float]) -> Drawn | None:
    return drawn_mean(values, _clusters(answers)) if answers else None


def _clusters(answers: Iterable[Answer]) -> list[str]:
    return [answer.cluster for answer in answers]


def _averaged(parts: Sequence[Quality]) -> Quality:
    def of(field: str) -> Drawn | None:
        found = [getattr(part, field) for part in parts]
        return None if None in found else averaged(found)

    return Quality(
        score=averaged([part.score for part in parts]),
        difference=of("difference"),
        kl=of("kl"),
        top1=of("top1"),
        cut=sum(part.cut for part in parts),
    )
