"""Running rows through the engine the way tests need it: every row's logits, at any cut into forwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from redknot.latents.segment import Segment
from redknot.latents.session import Session
from redknot.latents.workspace import Workspace
from redknot.runtime.counters import Counters
from redknot.runtime.forward import Stage, forward
from redknot.runtime.layout import RowSet
from redknot.runtime.model import Model
from tests.kit.memory import nan_memory


def poisoned_session(model: Model, length: int, spare: int = 40, memory: Workspace | None = None) -> Session:
    """An open session of one segment whose unset memory is NaN; those of one batch are of one ``memory``."""
    return segmented_session(model, [length], spare=spare, memory=memory)


def segmented_session(
    model: Model,
    lengths: Sequence[int],
    starts: Sequence[int] | None = None,
    spare: int = 40,
    memory: Workspace | None = None,
) -> Session:
    """Consecutive segments, all but the last closed, each in a frame that begins at its own start; memory is NaN."""
    memory = memory or nan_memory(model.geometry)
    segments, at = [], 0
    for number, length in enumerate(lengths):
        start = starts[number] if starts is not None else 0
        segment = Segment(at - start, start, start + length, closed=number < len(lengths) - 1)
        memory.allocate(segment, length + spare)
        segments.append(segment)
        at += length
    return memory.session(segments)


@torch.inference_mode()
def every_row(
    model: Model,
    ids: Tensor,
    cuts: Sequence[int] = (),
    session: Session | None = None,
    counters: Counters | None = None,
) -> Tensor:
    """Logits of all rows [T, vocab]; ``cuts`` are the positions at which one forward ends and the next begins."""
    session = session if session is not None else poisoned_session(model, len(ids))
    edges = [0, *cuts, len(ids)]
    out = []
    for lo, hi in pairwise(edges):
        rows = RowSet(model.geometry, (session,), (torch.arange(lo, hi),))
        out.append(forward(model, [all_layers(rows, ids[lo:hi])], counters or Counters()))
    return torch.cat(out)


def all_layers(rows: RowSet, ids: Tensor, **options: Any) -> Stage:
    """One stage of every layer, all of whose rows give logits unless ``go_on`` says which."""
    go_on = options.pop("go_on", torch.arange(rows.size))
    return Stage(range(rows.geometry.num_layers), rows, ids, go_on=go_on, **options)


def widest(found: Tensor, expected: Tensor) -> float:
    """The largest absolute difference; NaN counts as infinite."""
    assert found.shape == expected.shape
    return float((found - expected).abs().nan_to_num(nan=float("inf")).max())
