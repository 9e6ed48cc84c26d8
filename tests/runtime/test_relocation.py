"""Relocation as attention does it: what is read of several segments meets queries at their request positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from redknot.latents.segment import Segment, allocate
from redknot.latents.session import Session
from redknot.model.geometry import LayerKind, geometry_from_config
from redknot.ops.rope import rotate, rotation_at
from redknot.runtime.attention import Scope, _read
from redknot.runtime.counters import Counters
from redknot.runtime.layout import RowSet
from redknot.runtime.model import Model
from tests.model.test_geometry import FLASH
from tests.ops.test_rope import MILLION, SHIFTS, turned, unit
from tests.runtime.test_reads import rows_of

DOCUMENT, QUESTION = 300, 11
LAYERS = (LayerKind.SLIDING, LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA)
READS = ((0, "window"), (2, "window"), (3, "window"), (2, "entries"), (3, "entries"), (2, "index_keys"))


def flash_without_weights() -> Model:
    """The first layers of Flash; reading asks for frequencies only."""
    geometry = geometry_from_config(FLASH)
    geometry = replace(geometry, kinds=geometry.kinds[:4], hash_layers=geometry.hash_layers[:4])
    assert geometry.kinds == LAYERS
    nothing: Any = None
    return Model(geometry, nothing)


@pytest.mark.parametrize("shift", SHIFTS)
def test_read_latents_meet_queries_as_float64_angles_say(shift: int) -> None:
    """<q, k> of a question over a document and itself, windows, entries and index keys, both rotary kinds."""
    model, total = flash_without_weights(), DOCUMENT + QUESTION
    geometry, offset = model.geometry, min(shift, MILLION - total)
    known = Segment(offset, 0, DOCUMENT, closed=True)
    question = Segment(offset + DOCUMENT, 0, QUESTION, closed=False)
    session = Session([known, question])
    plain: dict[tuple[Segment, int, str], Tensor] = {}  # what was not rotated yet
    for seed, segment in enumerate(session.segments):
        allocate(segment, geometry, segment.length, fill=float("nan"))
        for layer, kind in READS:
            held, inverse = getattr(segment.layers[layer], kind), model.frequencies[geometry.rope(layer)]
            plain[segment, layer, kind] = unit(*held.shape, seed=100 * seed + 10 * layer + len(kind))
            step = 1 if kind == "window" else geometry.ratio(layer)
            held.copy_(turned(plain[segment, layer, kind], torch.arange(len(held)) * step, inverse))
    stored = [getattr(segment.layers[layer], kind) for segment in session.segments for layer, kind in READS]
    before = [tensor.clone() for tensor in stored]
    positions = offset + DOCUMENT + torch.arange(QUESTION)
    [block] = RowSet(geometry, (session,), (positions,)).blocks
    for layer, kind in READS:  # one block, as in a forward: what a layer leaves in its cache, later ones find
        inverse = model.frequencies[geometry.rope(layer)]
        seen = block.windows if kind == "window" else block.entries[geometry.ratio(layer)]
        assert seen is not None
        keys = _read(Scope(model, layer, Counters()), block, seen.table, kind)
        queries = unit(QUESTION, keys.shape[1], seed=7)
        found = rotate(queries, rotation_at(positions, inverse)) @ keys.T
        rows = rows_of(seen.table)
        step = 1 if kind == "window" else geometry.ratio(layer)
        at = torch.tensor([segment.offset + row * step for segment, row, _ in rows])
        raw = torch.stack([plain[segment, layer, kind][row] for segment, row, _ in rows])
        assert {segment for segment, _, _ in rows} == ({known, question} if step <= QUESTION else {known})
        expected = turned(queries, positions, inverse) @ turned(raw, at, inverse).T
        assert (found - expected).abs().max() <= 1e-5
    # Stored latents stay in their own frames.
    assert all(torch.equal(old, now) for old, now in zip(before, stored, strict=True))
