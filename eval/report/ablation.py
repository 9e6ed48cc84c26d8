"""Arms that differ in one setting, next to each other; found from the recorded profiles, not from names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eval.report.blocks import Block, Heading, Paragraph, table
from eval.report.numbers import NOTHING, change, points, times
from eval.report.quality import change as change_of
from eval.report.quality import counted, data_sets, overall, share
from eval.report.sections import Section
from eval.report.speed import chosen, speeds

BASES = ("rowsparse", "headsplit", "turbo", "combined", "recompute")  # shipped profiles; a pair is shown once
_MISSING = "not set"


@dataclass(frozen=True)
class Family:
    """The arms that differ from ``base`` in nothing but ``field``, and the value that each has there, base included."""

    base: str
    field: str
    values: dict[str, str]


def families(arms: Mapping[str, Mapping[str, Any]]) -> list[Family]:
    """Every family of profiles, in the order of ``BASES``."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    shown: set[frozenset[str]] = set()
    for base in BASES:
        for arm, profile in arms.items():
            differing = _differing(arms.get(base, {}), profile)
            if not profile or not arms.get(base) or len(differing) != 1 or frozenset((base, arm)) in shown:
                continue
            shown.add(frozenset((base, arm)))
            (field,) = differing
            own, other = differing[field]
            found.setdefault((base, field), {base: own})[arm] = other
    return [Family(base, field, values) for (base, field), values in found.items()]


def ablation_part(section: Section, tool: str) -> list[Block]:
    """A table for each family whose arms were measured; none where there is none."""
    means = overall(counted(data_sets(section, tool)))
    timed = speeds(section, chosen(section, "hot", tool) or chosen(section, "hot"))
    out: list[Block] = []
    for family in families(section.arms):
        measured = [arm for arm in family.values if arm in means or arm in timed]
        if family.base not in measured or len(measured) < 2:
            continue
        against = overall(counted(data_sets(section, tool, family.base)))
        rows = [
            (
                arm,
                family.values[arm],
                points(share(means[arm].score)) if arm in means else NOTHING,
                change(change_of(means[arm].difference)) if arm in means else NOTHING,
                change(change_of(against[arm].difference)) if arm in against else NOTHING,
                times(timed[arm].request) if arm in timed else NOTHING,
            )
            for arm in sorted(measured, key=lambda arm: _order(family.values[arm]))
        ]
        header = ("Arm", family.field, "Score", "To recompute", f"To {family.base}", "Hot TTFT ratio")
        marked = [number for number, row in enumerate(rows) if row[0] == family.base]
        out += [Heading(f"{family.field} of {family.base}", 3), table(header, rows, left=2, marked=marked)]
    if not out:
        return []
    text = "Each table compares arms whose profiles differ in one field only. Over all data sets that are informative."
    return [Heading(f"Ablations: {tool}"), Paragraph(text), *out]


def _differing(base: Mapping[str, Any], other: Mapping[str, Any], inside: str = "") -> dict[str, tuple[str, str]]:
    """Each field that differs, by its path, with both values as JSON; the name of a profile is no field."""
    found: dict[str, tuple[str, str]] = {}
    for key in sorted((base.keys() | other.keys()) - ({"name"} if not inside else set())):
        left, right = base.get(key, _MISSING), other.get(key, _MISSING)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found |= _differing(left, right, f"{inside}{key}.")
        elif left != right:
            found[f"{inside}{key}"] = (_value(left), _value(right))
    return found


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _order(value: str) -> tuple[float, str]:
    """Numbers by size, other values behind them."""
    try:
        return float(value), value
    except ValueError:
        return float("inf"), value
