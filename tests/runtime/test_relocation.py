"""Relocation as attention does it: what is read of several segments meets queries at their request positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from redknot.latents.segment import Segment
from redknot.model.geometry import LayerKind, geometry_from_config
from redknot.ops.rope import rotate, rotation_at
from redknot.runtime.attention import Scope, _read_entries, _read_windows
from redknot.runtime.counters import Counters
from redknot.runtime.layout import RowSet
from redknot.runtime.model import Model
from tests.kit.memory import nan_memory
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
    memory = nan_memory(geometry)
    session = memory.session([known, question])
    plain: dict[tuple[Segment, int, str], Tensor] = {}  # what was not rotated yet
    for seed, segment in enumerate(session.segments):
        memory.allocate(segment, segment.length)
        for layer, kind in READS:
            held, inverse = getattr(segment.layers[layer], kind), model.frequencies[geometry.rope(layer)]
            step = 1 if kind == "window" else geometry.ratio(layer)
            rows, width = -(-segment.length // step), held[:1].shape[1]
            plain[segment, layer, kind] = unit(rows, width, seed=100 * seed + 10 * layer + len(kind))
            held[:rows] = turned(plain[segment, layer, kind], torch.arange(rows) * step, inverse).float()
    stored = [getattr(segment.layers[layer], kind) for segment in session.segments for layer, kind in READS]
    before = [held[:].clone() for held in stored]
    positions = offset + DOCUMENT + torch.arange(QUESTION)
    [block] = RowSet(geometry, (session,), (positions,)).blocks
    for layer, kind in READS:  # one block, as in a forward: what a layer leaves in its cache, later ones find
        inverse = model.frequencies[geometry.rope(layer)]
        seen = block.windows if kind == "window" else block.entries[geometry.ratio(layer)]
        assert seen is not None
        scope = Scope(model, layer, Counters())
        window = kind == "window"
        keys = _read_windows(scope, block, seen.table) if window else _read_entries(scope, block, seen, kind)
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
    assert all(torch.equal(old.nan_to_num(9), now[:].nan_to_num(9)) for old, now in zip(before, stored, strict=True))
