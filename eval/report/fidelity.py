"""How far each arm is from recompute inside the model, beside the noise floor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from eval.names import NOISE_FLOOR
from eval.report.blocks import Block, Fold, Heading, Paragraph, Plot, table
from eval.report.charts.lines import Axis, lines
from eval.report.numbers import count, nats, points
from eval.report.sections import Section
from eval.results import Fidelity
from eval.statistics import clustered_mean

_LAYER = Axis("layer", lambda layer: f"{layer:.0f}")
_ERROR = Axis("relative error of the hidden state", lambda error: f"{error:.0e}".replace("e-0", "e-"), log=True)


def fidelity_part(section: Section) -> list[Block]:
    """The blocks; none where nothing was compared."""
    arms = _by_arm(section, section.fidelity)
    if not arms:
        return []
    errors = {arm: _errors(of) for arm, of in arms.items()}
    curves = {arm: list(enumerate(error)) for arm, error in errors.items() if error}
    sets = sorted({found.dataset for found in section.fidelity})
    rows = [
        (
            dataset,
            arm,
            count(len(of)),
            _mean(of, "kl"),
            _mean(of, "top1"),
            f"{_errors(of)[-1]:.2g}" if _errors(of) else "",
        )
        for dataset in sets
        for arm, of in _by_arm(section, (f for f in section.fidelity if f.dataset == dataset)).items()
    ]
    title = "Relative error of the hidden state behind each layer, mean over prompts"
    text = "Against recompute, over the last rows of each prompt; KL (nats) and top-1 agreement are their means."
    out: list[Block] = [Heading("Fidelity"), Paragraph(text)]
    if NOISE_FLOOR not in arms:
        out.append(Paragraph("No noise floor was recorded: small errors cannot be told from rounding.", warning=True))
    if curves:
        out.append(Plot(lines(curves, _LAYER, _ERROR, title), title))
    out.append(table(("Data set", "Arm", "Prompts", "KL", "Top-1", "Error, last layer"), rows, left=2))
    return [*out, _layers(errors)] if curves else out


def noise_floor(section: Section) -> str:
    """One sentence on the noise floor; empty where none was recorded."""
    found = [of for of in section.fidelity if of.arm == NOISE_FLOOR]
    if not found:
        return ""
    text = f"KL {_mean(found, 'kl')}, top-1 {_mean(found, 'top1')}, over {count(len(found))} prompts"
    return f"Noise floor, recompute run another way: {text}. What an arm shows below it is rounding."


def _by_arm(section: Section, records: Iterable[Fidelity]) -> dict[str, list[Fidelity]]:
    found: dict[str, list[Fidelity]] = {}
    for record in records:
        found.setdefault(record.arm, []).append(record)
    return {arm: found[arm] for arm in section.arms if arm in found}


def _mean(records: Sequence[Fidelity], field: str) -> str:
    items = [f"{of.run} {of.dataset} {of.item}" for of in records]
    interval = clustered_mean([getattr(of, field) for of in records], items)
    return points(interval) if field == "top1" else nats(interval)


def _errors(records: Sequence[Fidelity]) -> list[float]:
    """Mean error of each layer, over the records with as many layers as the first one (a model has one number)."""
    layers = len(records[0].layers)
    rows = [of.layers for of in records if len(of.layers) == layers]
    return [float(error) for error in np.mean(rows, axis=0)] if layers else []


def _layers(errors: dict[str, list[float]]) -> Fold:
    deep = max(map(len, errors.values()))
    rows = [
        (str(layer), *(f"{error[layer]:.2e}" if layer < len(error) else "" for error in errors.values()))
        for layer in range(deep)
    ]
    return Fold("Every layer", (table(("Layer", *errors), rows),))
