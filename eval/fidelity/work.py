"""The prompts of a run through the arms that they lack, into the results, and the means of what is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eval.encoder import Encoder
from eval.fidelity.compare import difference, noise_floor, recomputed, traces
from eval.items import DataSet, Item
from eval.names import NOISE_FLOOR
from eval.progress import progress
from eval.recorder import Recorder
from eval.results import Fidelity
from redknot.build.target import Target
from redknot.model.profile import Profile
from redknot.runtime.model import Model


@dataclass(frozen=True)
class Line:
    """The means over the prompts of a data set."""

    dataset: str
    arm: str
    prompts: int
    layers: tuple[float, ...]  # relative error behind each
    kl: float
    top1: float

    @property
    def worst_layer(self) -> int:
        """Behind which the error is largest."""
        return self.layers.index(max(self.layers))


def compare(
    model: Model,
    profiles: Mapping[str, Profile],
    wanted: Sequence[Target],
    sets: Sequence[DataSet],
    encoder: Encoder,
    recorder: Recorder,
) -> None:
    """Compare what no earlier run has, prompt by prompt."""
    work = [item for dataset in sets for item in dataset.items()]
    done = {dataset.name: recorder.compared(dataset.name) for dataset in sets}
    with progress(len(work), "prompt", "fidelity") as bar:
        for item in work:
            missing = [name for name in (NOISE_FLOOR, *profiles) if (item.id, name) not in done[item.dataset]]
            for record in _records(model, profiles, wanted, item, encoder, missing, recorder.run.run):
                recorder.add(record)
            bar.update()


def _records(
    model: Model,
    profiles: Mapping[str, Profile],
    wanted: Sequence[Target],
    item: Item,
    encoder: Encoder,
    missing: Sequence[str],
    run: str,
) -> Iterator[Fidelity]:
    if not missing:
        return
    prompt = encoder.encode(item)
    reference = recomputed(model, prompt)
    found = {NOISE_FLOOR: noise_floor(model, prompt)} if NOISE_FLOOR in missing else {}
    found |= traces(model, prompt, {name: profiles[name] for name in missing if name != NOISE_FLOOR}, wanted)
    for name, trace in found.items():
        far = difference(reference, trace)
        yield Fidelity(
            run=run,
            dataset=item.dataset,
            item=item.id,
            arm=name,
            prompt_tokens=len(prompt),
            layers=far.layers,
            kl=far.kl,
            top1=far.top1,
        )


def summary(records: Sequence[Fidelity]) -> list[Line]:
    """One line for each data set and arm, in the order in which they came."""
    lines = []
    for dataset, arm in dict.fromkeys((one.dataset, one.arm) for one in records):
        mine = [one for one in records if (one.dataset, one.arm) == (dataset, arm)]
        layers = np.mean([one.layers for one in mine], axis=0).tolist()
        kl, top1 = (float(np.mean([getattr(one, name) for one in mine])) for name in ("kl", "top1"))
        lines.append(Line(dataset, arm, len(mine), tuple(layers), kl, top1))
    return lines
