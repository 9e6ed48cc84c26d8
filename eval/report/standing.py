"""What an arm costs and gives, put together: one line of the summary, and the choice that follows from all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from eval.names import NO_DOCUMENTS
from eval.report.checks import FIXED
from eval.report.quality import DataSet, Quality, change, counted, data_sets, overall
from eval.report.sections import Section
from eval.report.speed import Speed, break_even, build_seconds_a_token, chosen, speeds
from eval.statistics import Interval

MIN_CONTEXTS = 20  # of a data set that decides: bootstrap intervals of few are too narrow


@dataclass(frozen=True)
class Standing:
    """One arm over some questions and requests; what was not measured is None."""

    arm: str
    quality: Quality | None
    speed: Speed | None  # hot
    break_even: float | None
    rejected: int
    weakest: tuple[str, Interval] | None = None  # the data set where it loses most against recompute, and how much


@dataclass(frozen=True)
class Standings:
    """One tool's data sets, each with its arms, and the arms over all data sets that decide."""

    tool: str
    sets: tuple[DataSet, ...]
    deciding: tuple[DataSet, ...]
    arms: tuple[Standing, ...]  # over all
    each: dict[str, tuple[Standing, ...]]  # by data set


def standings(section: Section, tool: str) -> Standings:
    """Everything about one tool's questions. Times are those of its own data sets where it took any."""
    sets = data_sets(section, tool)
    deciding = counted(sets)
    means = overall(deciding)
    weakest = {arm: _weakest(arm, deciding) for arm in section.arms}
    hot = chosen(section, "hot", tool) or chosen(section, "hot")
    over_all = _stand(section, means, speeds(section, hot), tool, "")
    each = {}
    for of in sets:
        own = speeds(section, chosen(section, "hot", tool, of.name))
        each[of.name] = tuple(_stand(section, of.arms, own, tool, of.name))
    return Standings(
        tool=tool,
        sets=tuple(sets),
        deciding=tuple(deciding),
        arms=tuple(Standing(**{**vars(standing), "weakest": weakest[standing.arm]}) for standing in over_all),
        each=each,
    )


def acceptable(standing: Standing, standings: Standings, margin: float) -> bool:
    """Whether an arm was timed and loses at most ``margin`` (a share) on every deciding data set, interval included."""
    if standing.arm in FIXED or standing.speed is None or standing.speed.request is None:
        return False
    return bool(standings.deciding) and all(_loses_at_most(of, standing.arm, margin) for of in standings.deciding)


def fastest(standings: Standings, margin: float) -> Standing | None:
    """The arm with the highest hot ratio of those that lose at most ``margin``; None where none is faster at all."""
    good = [standing for standing in standings.arms if acceptable(standing, standings, margin)]
    faster = [standing for standing in good if _ratio(standing) > 1]
    return max(faster, key=_ratio, default=None)


def _ratio(standing: Standing) -> float:
    assert standing.speed is not None  # of an acceptable arm
    assert standing.speed.request is not None
    return standing.speed.request.value


def _loses_at_most(of: DataSet, arm: str, margin: float) -> bool:
    drawn = of.arms[arm].difference if arm in of.arms else None
    found = change(drawn)
    if drawn is None or found is None or found.low is None or drawn.clusters < MIN_CONTEXTS:
        return False
    return found.low >= -margin - 1e-9


def _weakest(arm: str, sets: Sequence[DataSet]) -> tuple[str, Interval] | None:
    found = [(of.name, i) for of in sets if arm in of.arms and (i := change(of.arms[arm].difference)) is not None]
    return min(found, key=lambda named: named[1].value, default=None) if arm != NO_DOCUMENTS else None


def _stand(
    section: Section, quality: dict[str, Quality], speed: dict[str, Speed], tool: str, dataset: str
) -> list[Standing]:
    builds = [b for b in section.builds if section.tools[b.run] == tool and (not dataset or b.dataset == dataset)]
    a_token = build_seconds_a_token(builds) or build_seconds_a_token(section.builds)
    rejected = Counter(
        record.arm
        for record in section.rejected
        if section.tools[record.run] == tool and (not dataset or record.dataset == dataset)
    )
    return [
        Standing(
            arm=arm,
            quality=quality.get(arm),
            speed=speed.get(arm),
            break_even=break_even(speed[arm], a_token) if arm in speed else None,
            rejected=rejected[arm],
        )
        for arm in section.arms
        if arm in quality or arm in speed or rejected[arm]
    ]
