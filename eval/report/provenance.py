"""Where the figures come from: runs, machines, versions, profiles, what was cut and what does not count."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from eval.names import RECOMPUTE
from eval.report.blocks import Block, Fold, Heading, Paragraph, Table, table
from eval.report.numbers import count
from eval.report.sections import Section
from eval.results import Run

_REASONS = 20  # lines of the table of what was rejected
_DIGITS = 12  # of a hash


def rejected_part(section: Section) -> list[Block]:
    """What does not count, by data set, arm and reason."""
    found = Counter((record.dataset, record.arm, record.reason) for record in section.rejected)
    if not found:
        return [Heading("Rejected"), Paragraph("Nothing was rejected.")]
    order = sorted(found.items(), key=lambda entry: (-entry[1], entry[0]))
    rows = [(*where, count(number)) for where, number in order[:_REASONS]]
    if len(order) > _REASONS:
        rest = sum(number for _, number in order[_REASONS:])
        rows.append(("others", "", f"{len(order) - _REASONS} more combinations", count(rest)))
    text = "These records are in none of the figures above."
    return [Heading("Rejected"), Paragraph(text), table(("Data set", "Arm", "Reason", "Records"), rows, left=3)]


def provenance_part(section: Section) -> list[Block]:
    """Runs, hardware, versions and profiles; what changed between runs is said in front."""
    out: list[Block] = [Heading("Provenance"), *warnings(section)]
    answered = [answer for answer in section.answers if answer.arm == RECOMPUTE]
    cut = sum(answer.cut for answer in answered)
    out.append(Paragraph(f"Prompts whose middle was cut out to fit: {count(cut)} of {count(len(answered))}."))
    digests = {(arm, digest) for run in section.runs for arm, digest in run.digests.items()}
    profiles = [(arm, digest[:_DIGITS]) for arm, digest in sorted(digests)]
    out.append(
        Fold("Profiles and their hashes", (table(("Arm", "Profile hash"), profiles, left=2), _profiles(section)))
    )
    return [*out, *(Fold(f"{run.tool}, started {run.started}, run {run.run}", (_run(run),)) for run in section.runs)]


def warnings(section: Section) -> list[Block]:
    """What a reader must know before trusting absolute times or comparing runs."""
    commits = sorted({run.commit for run in section.runs})
    machines = {json.dumps(run.hardware, sort_keys=True) for run in section.runs}
    out = []
    if any(commit.endswith("+") for commit in commits):
        out.append("Some runs had files that differed from their commit (marked +).")
    if len(commits) > 1:
        out.append(f"Runs of {len(commits)} commits are put together.")
    if len(machines) > 1:
        out.append("Runs of several machines are put together: compare ratios, not absolute times.")
    return [Paragraph(text, warning=True) for text in out]


def _run(run: Run) -> Table:
    facts: dict[str, str] = {
        "command": " ".join(_typed(_portable(word)) for word in run.command),
        "commit": run.commit or "outside a repository",
        "engine": f"{run.engine}, TP {run.tp}",
    }
    groups: Mapping[str, Mapping[str, Any]] = {
        "model": run.model,
        "version of": run.versions,
        "hardware": run.hardware,
        "option": run.options,
    }
    for name, values in groups.items():
        facts |= {f"{name} {key}": _plain(value) for key, value in sorted(values.items())}
    return table(("What", "Value"), list(facts.items()), left=2)


def _profiles(section: Section) -> Table:
    rows = [(arm, json.dumps(profile, sort_keys=True)) for arm, profile in section.arms.items() if profile]
    return table(("Arm", "Profile"), rows, left=2)


def _plain(value: object) -> str:
    text = _portable(value)
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False, sort_keys=True)


def _typed(word: str) -> str:
    """A word of a command as it was typed, or could have been."""
    return word if len(word.split()) == 1 and not set("'\"\\$") & set(word) else shlex.quote(word)


def _portable(value: Any) -> Any:
    """A value whose words come without the folders of the machine where they were typed."""
    if isinstance(value, dict):
        return {str(key): _portable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(inner) for inner in value]
    if not isinstance(value, str):
        return value
    path = PurePath(value)
    return f"…/{path.name}" if path.is_absolute() and path.name else value
