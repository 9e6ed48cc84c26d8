"""How wanted the rows of known documents are: one ranking of their groups per selector of a profile.

A ranking is float32 [groups over all runs]: the runs in request order, each cut into groups of ``csa_ratio`` tokens
from its own first one, the last group as short as it comes. Higher is more wanted; ``plan.rows.pick_rows`` takes any.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from redknot.latents.segment import Segment
from redknot.latents.session import Session
from redknot.latents.workspace import Workspace
from redknot.model.geometry import LayerKind
from redknot.plan.rows import KnownRun
from redknot.runtime.capture import Capture
from redknot.runtime.counters import Counters
from redknot.runtime.forward import Stage, forward
from redknot.runtime.layout import RowSet
from redknot.runtime.model import Model
from redknot.runtime.prefill import CHUNK_ROWS


@torch.inference_mode()
def rank_by_indexer(
    model: Model, session: Session, runs: Sequence[KnownRun], token_ids: Tensor, counters: Counters
) -> Tensor:
    """Rank the runs' groups by what the query looks for: [groups over all runs].

    The last w rows of the request run over the restored latents alone; the indexer scores they give each group are
    summed over rows and CSA layers. ``token_ids`` [n] is the whole request; the probe is counted in ``counters``.
    A layer scores when its rows run, so they run in the last one too where that is CSA.
    """
    geometry, total = model.geometry, session.length
    known = _known(session, runs)
    behind = max((segment.stop for segment in known), default=0)
    first = max(total - geometry.window, behind)
    capture, own = Capture(wants_scores=True), Counters()
    probe = Segment(first, 0, total - first, closed=False)
    with Workspace(session.memory_space()) as memory:
        memory.allocate(probe, probe.length)
        probing = memory.session([*known, probe])
        probing.reading = session.reading
        rows = RowSet(geometry, (probing,), (torch.arange(first, total),))
        go_on = torch.arange(rows.size) if geometry.kinds[-1] is LayerKind.CSA else _nobody()
        stage = Stage(range(geometry.num_layers), rows, token_ids[first:], go_on=go_on)
        if probe.length:
            forward(model, [stage], own, capture)
    counters.add_probe(own)
    nothing = torch.zeros(0)
    scores = []
    for segment in known:
        count = segment.entries(geometry.csa_ratio)
        found = capture.entry_scores.get(id(segment), nothing).cpu()
        scores.append(torch.cat((found, torch.zeros(count - len(found)))))
    return torch.cat(scores)


@torch.inference_mode()
def rank_by_deviation(
    model: Model,
    session: Session,
    scratch: Session,
    runs: Sequence[KnownRun],
    token_ids: Tensor,
    layer: int,
    counters: Counters,
    chunk: int = CHUNK_ROWS,
) -> Tensor:
    """Rank the runs' groups by how far stored latents are from what this request computes: [groups over all runs].

    All rows up to the last known one run natively, in order, until they have left their latents in ``layer``; a group
    scores the squared distance of its rows' fresh window latents there to the restored ones in ``session``. Rows
    behind the last known one change none of these, so they do not run. ``scratch`` is cut like ``session`` and has
    memory of its own, which is filled here (layers 0 to ``layer``); ``session`` is only read. ``token_ids`` [n] is
    the whole request; the probe is counted in ``counters``.
    """
    own = Counters()
    _run_up_to(model, scratch, token_ids[: runs[-1].stop], layer, own, chunk)
    counters.add_probe(own)
    session.require(layer)
    pairs = zip(_known(session, runs), _known(scratch, runs), strict=True)
    return torch.cat([_deviations(kept, fresh, layer, model.geometry.csa_ratio) for kept, fresh in pairs]).cpu()


def _known(session: Session, runs: Sequence[KnownRun]) -> list[Segment]:
    """The segments that hold known runs, in request order."""
    starts = {run.start for run in runs}
    return [segment for segment in session.segments if segment.first in starts]


def _run_up_to(model: Model, session: Session, token_ids: Tensor, layer: int, counters: Counters, chunk: int) -> None:
    """Run the rows of ``token_ids`` [n] from position 0 on, until they have left their latents in ``layer``.

    Rows run in chunks as in ``prefill``, so that memory does not grow with the request beyond the latents themselves.
    """
    block = model.geometry.block_length
    step = max(chunk // block * block, block)
    for lo in range(0, len(token_ids), step):
        ids = token_ids[lo : lo + step]
        rows = RowSet(model.geometry, (session,), (torch.arange(lo, lo + len(ids)),))
        forward(model, [Stage(range(layer + 1), rows, ids, go_on=_nobody())], counters)


def _deviations(kept: Segment, fresh: Segment, layer: int, group: int) -> Tensor:
    """Squared distance of two segments' window latents [n, d], summed over each group of rows: [ceil(n / group)]."""
    stored, found = (segment.layers[layer].window[: segment.length] for segment in (kept, fresh))
    rows = (found - stored).square().sum(-1)
    return pad(rows, (0, -len(rows) % group)).view(-1, group).sum(-1)


def _nobody() -> Tensor:
    """Rows that leave a probe's last layer: none, its logits are not wanted."""
    return torch.empty(0, dtype=torch.int64)
