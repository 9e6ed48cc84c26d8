"""The parts of a report in their order: what decides first, where it comes from last."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eval.report.ablation import ablation_part
from eval.report.blocks import Block, Document, Heading, Paragraph
from eval.report.fidelity import fidelity_part, noise_floor
from eval.report.files import read_runs, results_files
from eval.report.groups import groups_part
from eval.report.ledgers import ledger_part
from eval.report.lengths import length_part
from eval.report.provenance import provenance_part, rejected_part, warnings
from eval.report.quality import change
from eval.report.sections import Section, sections
from eval.report.serving import serving_part
from eval.report.standing import Standings, standings
from eval.report.summary import summary
from eval.report.texts import texts_part

TITLE = "RedKnot: what each profile costs and gives"
HARNESS_ONLY = ("longbench", "ruler")  # what a test checkpoint was never taught
_TEST_MODEL = "nano"
_MAIN_TOOL = "nanoqa"


def read_sections(paths: Sequence[Path]) -> list[Section]:
    """Everything below these paths, one section for each model, engine and tensor parallelism."""
    return sections(read_runs(results_files(paths)))


def document(found: Sequence[Section], title: str = TITLE, texts: bool = True, prefix: str = "") -> Document:
    """The whole report; ``prefix`` stands in front of the names of pictures."""
    out: list[Block] = []
    files = (f"{prefix}pareto{'' if number == 1 else f'-{number}'}.svg" for number in itertools.count(1))
    if not found:
        out.append(Paragraph("The files hold no run.", warning=True))
    for section in found:
        run = section.runs[0]
        hashes = ", ".join(f"{key} {value[:12]}" for key, value in sorted(run.model.items()) if key != "name")
        out.append(Heading(f"{section.model}, {run.engine} engine, TP {run.tp}"))
        if len(found) > 1:
            out.append(Paragraph("Results of different checkpoints, engines or TP sizes are never put into one table."))
        out.append(Paragraph(f"Checkpoint: {hashes or 'no hashes recorded'}."))
        out += _section(section, files, texts)
    return Document(title, tuple(out))


def tools(section: Section) -> list[str]:
    """The tools that asked questions, the one that decides in front."""
    found = {section.tools[answer.run] for answer in section.answers}
    return sorted(found, key=lambda tool: (tool != _MAIN_TOOL, tool))


def figures(found: Sequence[Section]) -> list[dict[str, Any]]:
    """The summaries as plain JSON values."""
    return [
        {
            "model": section.model,
            "engine": section.runs[0].engine,
            "tp": section.runs[0].tp,
            "rejected": len(section.rejected),
            "tools": {tool: _figures(standings(section, tool)) for tool in tools(section)},
        }
        for section in found
    ]


def _section(section: Section, files: Iterator[str], texts: bool) -> list[Block]:
    out: list[Block] = list(warnings(section))
    asked = tools(section)
    for tool in asked:
        out.append(Heading(f"Quality against time: {tool}"))
        if section.model == _TEST_MODEL and tool in HARNESS_ONLY:
            text = (
                "nano was never trained for this benchmark: its scores here prove that the harness works, nothing else."
            )
            out.append(Paragraph(text, warning=True))
        out += summary(standings(section, tool), files, noise_floor(section))
    for tool in asked:
        out += [*groups_part(section, tool), *ablation_part(section, tool)]
    out += [*length_part(section), *ledger_part(section), *fidelity_part(section), *serving_part(section)]
    if texts:
        out += texts_part(section)
    return [*out, *rejected_part(section), *provenance_part(section)]


def _figures(of: Standings) -> dict[str, Any]:
    arms = {}
    for standing in of.arms:
        quality, speed, uses = standing.quality, standing.speed, standing.break_even
        difference = change(quality.difference) if quality else None
        arms[standing.arm] = {
            "score": vars(quality.score.interval((0.0, 1.0))) if quality else None,
            "difference": vars(difference) if difference else None,
            "hot_request_ratio": vars(speed.request) if speed and speed.request else None,
            "break_even_uses": uses if uses is not None and math.isfinite(uses) else None,
            "rejected": standing.rejected,
        }
    dull = [one.name for one in of.sets if one.informative is False]
    return {"arms": arms, "not_informative": dull}
