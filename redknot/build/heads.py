"""Measure how far each head's output drifts when a document stands behind others, and choose the Global heads by it.

A head that is Local is restored as it was when its document was evaluated alone; what that costs is the head's drift.
A row's attention output of a head [d], rotated back, as the output projection reads it, is o where the document stands
alone and o' behind other documents. W = W_a W_b [d, hidden] is the head's slice of both output projections. Since these
are linear and without bias, a layer's output is Y = sum over heads of o W, the identity that the split into Local and
Global heads rests on. Then

    drift = |(o' - o) W| / |o' W|  *  |o' W| / |Y'|  =  |(o' - o) W| / |Y'|,   Y' = sum over heads of o' W

where |.| is the L2 norm over all rows and channels. The first factor is the relative error of the head, the second its
share of the layer's output; their product is the relative error of the layer's output when this head alone is restored,
so that heads, groups and layers compare. In every group the heads of the largest drift become Global.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from redknot.artifact.identity import ModelIdentity, tagged_hash
from redknot.build.contents import Content
from redknot.build.plan import OnContent
from redknot.latents.session import Session
from redknot.latents.sizing import sized_for
from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace
from redknot.model.geometry import Geometry
from redknot.model.heads import HeadCorpus, HeadModel, HeadTable, MeasuredHeads, Remaining, fixed_table
from redknot.model.profile import RECOMPUTE
from redknot.plan.rows import KnownRun, Rows
from redknot.runtime.capture import Capture
from redknot.runtime.counters import Counters
from redknot.runtime.layout import Block
from redknot.runtime.model import Model
from redknot.runtime.restore import segmented_session
from redknot.runtime.reuse import Stages, run_stages


@dataclass
class HeadSums:
    """Squared norms over the rows measured so far."""

    errors: Tensor  # [layers, G, heads of a group] float64, of (o' - o) W
    outputs: Tensor  # [layers] float64, of Y'
    rows: int = 0

    @classmethod
    def of(cls, geometry: Geometry) -> HeadSums:
        """Nothing measured."""
        heads = (geometry.num_layers, geometry.o_groups, geometry.heads_per_group)
        return cls(torch.zeros(heads, dtype=torch.float64), torch.zeros(heads[0], dtype=torch.float64))

    @property
    def drifts(self) -> Tensor:
        """The drift of every head, [layers, G, heads of a group]; 0 where nothing differs."""
        return (self.errors / self.outputs.clamp(min=torch.finfo(torch.float64).tiny)[:, None, None]).sqrt()


def measure(model: Model, before: Sequence[Tensor], document: Tensor, sums: HeadSums) -> None:
    """Add what the heads of a document [n] do alone, and behind the token ids ``before``, piece by piece.

    Both run as reuse would count them: compressed groups from the start of each piece. ``model`` holds all heads.
    """
    alone = _Outputs()
    _evaluate(model, [document], alone)
    _evaluate(model, [*before, document], _Compared(model, sum(map(len, before)), alone, sums))
    sums.rows += len(document)


@torch.inference_mode()
def _evaluate(model: Model, pieces: Sequence[Tensor], capture: Capture) -> None:
    """Run every row of the pieces of a request; those of the last one go on to the end of the last layer."""
    ids, runs, start = torch.cat(list(pieces)), [], 0
    for number, piece in enumerate(pieces):
        runs.append(KnownRun(str(number), start, 0, len(piece), len(piece)))
        start += len(piece)
    sizes = sized_for(model.geometry, [len(piece) for piece in pieces])
    with LatentSpace(model.geometry, sizes) as space, Workspace(space) as memory:
        session = segmented_session(memory, runs, len(ids), room=0)
        run_stages(_every_row(model, session, ids, last=len(pieces[-1])), Counters(), capture=capture)


def _every_row(model: Model, session: Session, ids: Tensor, last: int) -> Stages:
    everything = torch.ones(len(ids), dtype=torch.bool)
    return Stages(model, session, [], Rows(len(ids), everything, ~everything), ids, RECOMPUTE, last)


@dataclass
class _Outputs(Capture):
    """What the heads of every row leave the output projection."""

    outputs: dict[int, list[Tensor]] = field(default_factory=dict)  # layer -> [t, G, heads of a group, d] by block

    def head_outputs(self, layer: int, block: Block, output: Tensor) -> None:
        self.outputs.setdefault(layer, []).append(output)


class _Compared(Capture):
    """Compares what heads leave of the rows from ``start`` on with what they left alone."""

    def __init__(self, model: Model, start: int, alone: _Outputs, sums: HeadSums) -> None:
        super().__init__()
        self._model, self._start, self._sums = model, start, sums
        self._alone = {layer: torch.cat(blocks) for layer, blocks in alone.outputs.items()}

    def head_outputs(self, layer: int, block: Block, output: Tensor) -> None:
        inside = block.positions >= self._start
        if bool(inside.any()):
            here, alone = output[inside], self._alone[layer][block.positions[inside] - self._start]
            errors, whole = squared_norms(self._model, layer, here - alone, here)
            self._sums.errors[layer] += errors
            self._sums.outputs[layer] += whole


def squared_norms(model: Model, layer: int, differences: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Of heads' outputs [t, G, heads of a group, d] behind both projections: each difference's, and the layer's.

    Squared norms over rows and channels, float64: [G, heads of a group] and [].
    """
    weights = model.weights.layers[layer].attn
    first = weights.wo_a.unflatten(-1, outputs.shape[2:])  # [G, R, heads of a group, d]
    second = weights.wo_b.unflatten(-1, first.shape[:2])  # [hidden, G, R]
    z = torch.einsum("tghd,grhd->tghr", differences, first)
    errors = torch.einsum("tghr,ogr->tgho", z, second).double().square().sum((0, 3))
    whole = torch.einsum("tghd,grhd->tgr", outputs, first).flatten(1) @ weights.wo_b.T
    return errors, whole.double().square().sum()


def contexts(contents: Sequence[Content], tokens: int, most: int, seed: int) -> list[tuple[int, ...]]:
    """For each content, which others stand in front of it: at least ``tokens`` tokens of them, where there are so many.

    Drawn by ``seed`` and the content's place. With the content they have at most ``most`` tokens; where no other one
    fits, the tuple is empty.
    """
    found = []
    for number, content in enumerate(contents):
        chosen: list[int] = []
        count, room = 0, most - len(content)
        for other in np.random.default_rng([seed, number]).permutation(len(contents)).tolist():
            length = len(contents[other])
            if count < tokens and other != number and length <= room - count:
                chosen.append(other)
                count += length
        found.append(tuple(chosen))
    return found


def measure_corpus(
    model: Model,
    contents: Sequence[Content],
    in_front: Sequence[tuple[int, ...]],
    on_done: OnContent = lambda content: None,
) -> HeadSums:
    """Measure the first contents, one for each of ``in_front``; those without anything in front are left out.

    A request begins with BOS where the model has one, and so does what stands in front.
    """
    sums, bos = HeadSums.of(model.geometry), model.geometry.bos_token_id
    ids = [torch.from_numpy(content.token_ids).long() for content in contents]
    begin = [] if bos is None else [torch.tensor([bos])]
    for number, others in enumerate(in_front):
        if others:
            measure(model, [*begin, *(ids[other] for other in others)], ids[number], sums)
        on_done(contents[number])
    return sums


def choose(drifts: Tensor, per_group: int) -> HeadTable:
    """The heads of the largest drift in every group; of equal ones the first."""
    best = drifts.argsort(dim=-1, descending=True, stable=True)[..., :per_group]
    return HeadTable.model_validate({"heads_per_group": drifts.shape[-1], "positions": best.tolist()})


def remaining(drifts: Tensor, table: HeadTable) -> float:
    """Mean drift of the heads that a table leaves Local, over all layers and groups."""
    local = torch.ones_like(drifts, dtype=torch.bool)
    local.scatter_(-1, torch.tensor(table.positions), value=False)
    return float(drifts[local].mean())


def measured_heads(
    model: Model, identity: ModelIdentity, sums: HeadSums, corpus: HeadCorpus, per_group: int
) -> MeasuredHeads:
    """The head table that follows from what was measured, with all of it."""
    drifts, fixed = sums.drifts, fixed_table(model.geometry, tuple(range(per_group)))
    table = choose(drifts, per_group)
    hashes = {name: getattr(identity, name) for name in HeadModel.model_fields}
    return MeasuredHeads(
        model=HeadModel(**hashes),
        corpus=corpus,
        table=table,
        remaining=Remaining(fixed=remaining(drifts, fixed), table=remaining(drifts, table)),
        drifts=tuple(tuple(tuple(group) for group in layer) for layer in drifts.tolist()),
    )


def corpus_digest(contents: Sequence[Content]) -> str:
    """SHA-256 (hex) over the token ids of all documents, in any order."""
    hashes = sorted(content.token_hash for content in contents)
    return tagged_hash("redknot.corpus", (("document", one.encode()) for one in hashes))
