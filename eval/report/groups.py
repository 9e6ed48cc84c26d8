"""Scores by group of a data set: LongBench-E's lengths, a task's subsets."""

from __future__ import annotations

from dataclasses import replace

from eval.report.blocks import Block, Heading, Paragraph, table
from eval.report.numbers import NOTHING, change, points
from eval.report.quality import DataSet, data_sets, share
from eval.report.quality import change as change_of
from eval.report.sections import Section


def groups_part(section: Section, tool: str) -> list[Block]:
    """A table for each data set that has groups; none where there is none."""
    found: dict[str, dict[str, DataSet]] = {}
    for group in sorted({answer.group for answer in section.answers if answer.group}):
        inside = tuple(answer for answer in section.answers if answer.group == group)
        for of in data_sets(replace(section, answers=inside), tool):
            found.setdefault(of.name, {})[group] = of
    if not found:
        return []
    out: list[Block] = [
        Heading(f"Scores by group: {tool}"),
        Paragraph("Points of 100, in parentheses the questions; behind them the difference to recompute."),
    ]
    for name, groups in sorted(found.items()):
        arms = dict.fromkeys(arm for of in groups.values() for arm in of.arms)
        rows = [(arm, *(cell for of in groups.values() for cell in _cells(of, arm))) for arm in arms]
        header = ("Arm", *(title for group in groups for title in (group, f"{group}, difference")))
        out += [Heading(name, 3), table(header, rows)]
    return out


def _cells(of: DataSet, arm: str) -> tuple[str, str]:
    quality = of.arms.get(arm)
    if quality is None:
        return NOTHING, NOTHING
    return f"{points(share(quality.score))} ({quality.score.n})", change(change_of(quality.difference))
