"""The part that decides: which arm to ship, the plot, and the tables over all data sets and for each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from eval.names import NO_DOCUMENTS, RECOMPUTE
from eval.report.blocks import Block, Fold, Heading, Paragraph, Plot, table
from eval.report.charts.pareto import Point, frontier, pareto
from eval.report.numbers import NOTHING, change, count, milliseconds, nats, points, times, uses
from eval.report.quality import DataSet, share
from eval.report.quality import change as change_of
from eval.report.standing import MIN_CONTEXTS, Standing, Standings, fastest
from eval.statistics import Interval

MARGINS = (0.01, 0.02, 0.05)  # of score, that a reader may be willing to lose

_COLUMNS = ("Score", "Difference", "KL", "Top-1", "Hot TTFT ratio", "forward", "p50 ms", "p95 ms", "Break-even", "n")
_LEGEND = (
    "Score: points of 100, the mean over data sets. Difference: to recompute, over the questions that both answered. "
    "KL (nats) and top-1 agreement are of the first answer token. Hot TTFT ratio: recompute's time from call to first "
    "token over the arm's, median over pairs; forward: the same for the model alone; p50 and p95: the arm's own "
    "times from the call. Break-even: how often the documents of a request must be used until building them has paid. "
    "In brackets: 95 % bootstrap intervals, for scores clustered by context (Wilson's where all are equal). Rejected: "
    "records that do not count."
)


def summary(standings: Standings, files: Iterator[str], floor: str) -> list[Block]:
    """The blocks of one tool; the plot takes the next of ``files`` as its name, ``floor`` tells of the noise floor."""
    out: list[Block] = [*_choice(standings), *_plot(standings, files)]
    out.append(Heading("All arms, over all data sets", 3))
    dull = [of.name for of in standings.sets if of not in standings.deciding]
    if dull:
        out.append(Paragraph(f"Without data sets that are not informative: {', '.join(dull)}."))
    out += [_over_all(standings), *([Paragraph(floor)] if floor else []), Paragraph(_LEGEND)]
    out.append(Heading("Each data set", 3))
    for of in standings.sets:
        out += _one_set(of, standings.each[of.name])
    return out


def best_arms(standings: Standings) -> set[str]:
    """The arms on the frontier."""
    return {point.name for point in frontier(_points(standings))}


def _choice(standings: Standings) -> list[Block]:
    rows = []
    for margin in MARGINS:
        arm = fastest(standings, margin)
        first = f"{100 * margin:.0f} of 100 points"
        if arm is None:
            rows.append((first, "none: recompute", NOTHING, NOTHING, NOTHING, NOTHING))
        else:
            assert arm.speed is not None
            difference = change(change_of(arm.quality.difference)) if arm.quality else NOTHING
            rows.append(
                (first, arm.arm, times(arm.speed.request), difference, _weakest_text(arm), uses(arm.break_even))
            )
    header = ("It may lose at most", "Fastest arm", "Hot TTFT ratio", "Difference", "Weakest data set", "Break-even")
    text = (
        "An arm is listed where its loss against recompute, lower end of the 95 % interval, stays within the margin on "
        f"every informative data set, each of at least {MIN_CONTEXTS} contexts, and where it was timed."
    )
    return [Heading("Which profile to ship", 3), table(header, rows, left=2), Paragraph(text)]


def _plot(standings: Standings, files: Iterator[str]) -> list[Block]:
    found = _points(standings)
    if not found:
        return [
            Paragraph("No plot: no arm has both a score on every data set and a time that is paired with recompute.")
        ]
    title = f"{standings.tool}: score against speed-up of the first token, every arm"
    caption = "Up and right is better. Filled and joined: no other arm is both better and faster. Bars: 95 % intervals."
    shown = {point.name for point in found}
    missing = [s.arm for s in standings.arms if s.arm not in shown and s.arm != NO_DOCUMENTS]
    out: list[Block] = [Plot(pareto(found, title), caption, next(files))]
    return [*out, Paragraph(f"Not in the plot, for want of times or scores: {', '.join(missing)}.")] if missing else out


def _points(standings: Standings) -> list[Point]:
    out = []
    for standing in standings.arms:
        speed = standing.speed
        if standing.quality is None or speed is None or standing.arm == NO_DOCUMENTS:
            continue
        ratio = Interval(1.0, None, None, speed.n) if standing.arm == RECOMPUTE else speed.request
        if ratio is not None:
            out.append(Point(standing.arm, ratio, standing.quality.score.interval((0.0, 1.0)).scaled(100)))
    return out


def _over_all(standings: Standings) -> Block:
    best = best_arms(standings)
    header = ("Arm", *_COLUMNS[:2], "Weakest data set", *_COLUMNS[2:], "Rejected")
    order = sorted(standings.arms, key=_slowest_first)
    rows = []
    for standing in order:
        figures = _figures(standing)
        rows.append((standing.arm, *figures[:2], _weakest_text(standing), *figures[2:], count(standing.rejected)))
    return table(header, rows, marked=[number for number, s in enumerate(order) if s.arm in best])


def _slowest_first(standing: Standing) -> float:
    """Recompute in front, then by speed-up, what was not timed last."""
    if standing.arm == RECOMPUTE:
        return -1.0
    return standing.speed.request.value if standing.speed and standing.speed.request else math.inf


def _one_set(of: DataSet, arms: Sequence[Standing]) -> list[Block]:
    rows = [(s.arm, *_figures(s), count(s.quality.cut) if s.quality else NOTHING, count(s.rejected)) for s in arms]
    out: list[Block] = [table(("Arm", *_COLUMNS, "Cut", "Rejected"), rows)]
    if of.informative is False:
        text = "not informative: recompute does not beat the answer without documents by 10 points"
        return [Paragraph(f"{of.name}: {text}.", warning=True), Fold(f"{of.name} ({text})", tuple(out))]
    note = "" if of.informative else " (not asked without documents)"
    return [Heading(f"{of.name}{note}", 4), *out]


def _figures(standing: Standing) -> tuple[str, ...]:
    quality, speed = standing.quality, standing.speed
    return (
        points(share(quality.score)) if quality else NOTHING,
        change(change_of(quality.difference)) if quality else NOTHING,
        nats(quality.kl.interval() if quality.kl else None) if quality else NOTHING,
        points(share(quality.top1)) if quality else NOTHING,
        times(speed.request) if speed else NOTHING,
        times(speed.forward) if speed else NOTHING,
        milliseconds(speed.request_p50) if speed else NOTHING,
        milliseconds(speed.request_p95) if speed else NOTHING,
        uses(standing.break_even),
        count(quality.score.n) if quality else NOTHING,
    )


def _weakest_text(standing: Standing) -> str:
    return NOTHING if standing.weakest is None else f"{standing.weakest[0]} {change(standing.weakest[1])}"
