"""The four ledgers of each arm side by side, from the reports of its own requests. They are never added."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from eval.names import NO_DOCUMENTS
from eval.report.blocks import Block, Fold, Heading, Paragraph, Plot, table
from eval.report.charts.bars import bars
from eval.report.numbers import amount, count, milliseconds, percent
from eval.report.sections import Section
from eval.report.speed import chosen, speeds

KINDS = {"token_rows": "token rows", "head_rows": "head rows", "arithmetic": "FLOPs"}
WALL_CLOCK = "wall clock"


@dataclass(frozen=True)
class Books:
    """One arm's ledgers over its requests: what share each says was saved, and seconds by timer, means."""

    requests: int
    shares: dict[str, float]  # by ledger
    seconds: dict[str, float]  # by timer


def ledger_part(section: Section) -> list[Block]:
    """The blocks; none where no report holds ledgers."""
    hot = chosen(section, "hot")
    reports: dict[str, list[dict[str, Any]]] = {}
    for record in hot or section.answers:
        reports.setdefault(record.arm, []).append(record.report)
    found = {arm: books(reports[arm]) for arm in section.arms if arm in reports and arm != NO_DOCUMENTS}
    found = {arm: of for arm, of in found.items() if of.requests}
    if not found:
        return []
    fast = {arm: 1 - 1 / speed.request.value for arm, speed in speeds(section, hot).items() if speed.request}
    columns = [*KINDS.values(), WALL_CLOCK]
    saved = {arm: [*(of.shares.get(kind) for kind in KINDS), fast.get(arm)] for arm, of in found.items()}
    title = "What each ledger says was saved of recompute"
    text = (
        "Four ways to count what reuse saved, each of its own whole: row-layers that did not run, rows of Local heads "
        "that did not run, FLOPs that did not run, and wall clock to the first token (hot, request, paired ratios). "
        "They overlap and have different units, so that they are never added."
    )
    rows = [(arm, count(found[arm].requests), *map(percent, values)) for arm, values in saved.items()]
    return [
        Heading("Four ledgers"),
        Paragraph(text),
        Plot(bars(columns, saved, title), title),
        table(("Arm", "Requests", *columns), rows),
        *_timers(found),
    ]


def books(reports: Iterable[dict[str, Any]]) -> Books:
    """The ledgers of one arm; reports without them are left out."""
    saved: defaultdict[str, float] = defaultdict(float)
    whole: defaultdict[str, float] = defaultdict(float)
    seconds: defaultdict[str, float] = defaultdict(float)
    requests = 0
    for report in reports:
        ledgers = report.get("ledgers")
        if not isinstance(ledgers, dict):
            continue
        requests += 1
        for kind in KINDS:
            entry = ledgers.get(kind)
            if isinstance(entry, dict):
                saved[kind] += amount(entry.get("saved"))
                whole[kind] += amount(entry.get("whole"))
        wall = ledgers.get("wall_clock")
        if isinstance(wall, dict):
            for timer, value in wall.items():
                seconds[str(timer)] += amount(value)
    shares = {kind: saved[kind] / whole[kind] for kind in KINDS if whole[kind]}
    return Books(requests, shares, {timer: total / requests for timer, total in seconds.items()})


def _timers(found: dict[str, Books]) -> list[Block]:
    timers = sorted({timer for of in found.values() for timer in of.seconds})
    if not timers:
        return []
    rows = [(arm, *(milliseconds(of.seconds.get(timer)) for timer in timers)) for arm, of in found.items()]
    return [Fold("Wall clock by timer, ms a request (timers may contain each other)", (table(("Arm", *timers), rows),))]
