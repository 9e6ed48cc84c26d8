"""Restoring, choosing and running rows: what is read from where, whatever the request looks like."""

from __future__ import annotations

import pytest
import torch

from redknot.build.capture import evaluate
from redknot.model.profile import SHIPPED
from redknot.plan.rows import KnownRun, Rows
from redknot.runtime.counters import Counters
from redknot.runtime.model import Model
from redknot.runtime.restore import segmented, segmented_session
from redknot.runtime.reuse import choose_rows, prefill_reusing
from tests.kit.memory import nan_memory
from tests.kit.requests import WINDOW, Memory, document, known, new, restored
from tests.kit.rows import widest
from tests.runtime.conftest import Served

DOCS = [document(length, number) for number, length in enumerate((96, 130, 64))]
EVERY_NEED = ("latents", "streams:1", "window_all", "zl:1:0")
REQUEST = [new(5), known(DOCS, 0), new(7, 1), known(DOCS, 1)]


@pytest.fixture(scope="module")
def model(served: Served) -> Model:
    return served.model


@pytest.fixture(scope="module")
def artifacts(model: Model) -> list[Memory]:
    return [Memory(s) for s in evaluate(model, [torch.tensor(ids) for ids in DOCS], EVERY_NEED, Counters())]


def test_a_request_is_cut_at_its_runs():
    runs = [KnownRun("a", 5, 0, 40, 40), KnownRun("b", 45, 32, 64, 100)]
    assert segmented(runs, 120) == [(0, 5, None), (5, 45, runs[0]), (45, 109, runs[1]), (109, 120, None)]
    assert segmented(runs[:1], 45) == [(0, 5, None), (5, 45, runs[0])]
    assert segmented([], 3) == [(0, 3, None)]


def test_segments_keep_the_frame_of_their_document(model):
    runs = [KnownRun("a", 5, 0, 40, 40), KnownRun("b", 45, 32, 64, 100)]
    segments = segmented_session(nan_memory(model.geometry), runs, 120, 10).segments
    assert [(s.offset, s.start, s.end, s.closed) for s in segments] == [
        (0, 0, 5, True),
        (5, 0, 40, True),
        (13, 32, 96, True),
        (109, 0, 11, False),
    ]
    assert [s.layers[0].window.shape[0] for s in segments] == [5, 40, 64, 21]
    # What is generated behind a known run lies in a segment of its own, where there is any.
    for room, closed in ((0, [True, True]), (10, [True, True, False])):
        ends_known = segmented_session(nan_memory(model.geometry), runs[:1], 45, room)
        assert [s.closed for s in ends_known.segments] == closed
        assert ends_known.length == 45


@pytest.mark.parametrize(("start", "stop"), [(0, 130), (0, 96), (32, 128), (64, 130), (96, 128)])
def test_what_is_restored_is_the_run_and_nothing_else(model, artifacts, start, stop):
    ids, _, session = restored(model, artifacts, [new(5), known(DOCS, 1, start, stop), new(3)])
    before, segment, after = session.segments
    assert len(ids) == 8 + stop - start
    for layer, held in enumerate(segment.layers):
        stored = artifacts[1].section(f"layers.{layer}.window")
        assert torch.equal(held.window, stored[start:stop])
        if ratio := model.geometry.ratio(layer):
            count = -(-(stop - start) // ratio)
            stored = artifacts[1].section(f"layers.{layer}.entries")
            assert torch.equal(held.entries[:count], stored[start // ratio : start // ratio + count])
    for other in (before, after):
        assert all(held.window.isnan().all() for held in other.layers)


@pytest.mark.parametrize("length", [33, 64, 130])
def test_a_tail_restores_the_last_window(model, length):
    ids = document(length, 60)
    (sections,) = evaluate(model, [torch.tensor(ids)], SHIPPED["turbo"].needs(), Counters())
    _, _, session = restored(model, [Memory(sections)], [known([ids], 0), new(3)])
    for layer, held in enumerate(session.segments[0].layers):
        assert held.window[: length - WINDOW].isnan().all()
        assert torch.equal(held.window[length - WINDOW :], sections[f"layers.{layer}.window"])


@pytest.mark.parametrize("name", ["headsplit", "turbo", "recompute"])
def test_no_probe_where_nothing_is_picked(model, artifacts, name):
    ids, sources, session = restored(model, artifacts, [*REQUEST, new(20, 3)])
    counters = Counters()
    rows = choose_rows(model, session, [source.run for source in sources], ids, SHIPPED[name], counters)
    assert counters == Counters()
    assert not bool(rows.active.any())


@pytest.mark.parametrize("name", ["rowsparse", "combined"])
def test_shares_of_the_candidates(model, artifacts, name):
    ids, sources, session = restored(model, artifacts, [*REQUEST, new(20, 3)])
    rows = choose_rows(model, session, [source.run for source in sources], ids, SHIPPED[name], Counters())
    candidates = 96 - 64 + 130 - 66  # all but first and last windows
    picked = int(rows.protected.sum()) - (len(ids) - candidates)
    active = int(rows.active.sum())
    assert 0 <= picked <= 0.05 * candidates
    assert 0 < active <= 0.10 * candidates


@pytest.mark.parametrize("name", ["headsplit", "combined", "rowsparse", "turbo"])
def test_logits_do_not_depend_on_the_chunk(model, artifacts, name):
    """Down to chunks in which no row of a middle layer runs."""
    found = []
    for chunk in (1024, 100, 7):
        ids, sources, session = restored(model, artifacts, [*REQUEST, known(DOCS, 2), new(20, 3)])
        rows = choose_rows(model, session, [source.run for source in sources], ids, SHIPPED[name], Counters())
        counters = Counters()
        logits = prefill_reusing(model, session, sources, rows, ids, SHIPPED[name], counters, chunk)
        found.append((logits, counters))
    for logits, counters in found[1:]:
        assert widest(logits, found[0][0]) <= 1e-4
        assert counters == found[0][1]


@pytest.mark.parametrize("name", ["combined", "rowsparse", "turbo"])
def test_only_chosen_rows_run(model, artifacts, name):
    """Row-layers by the arithmetic of the profile: all rows in fences, running ones in the middle."""
    profile = SHIPPED[name]
    ids, sources, session = restored(model, artifacts, [*REQUEST, new(20, 3)])
    rows = choose_rows(model, session, [source.run for source in sources], ids, profile, Counters())
    counters = Counters()
    prefill_reusing(model, session, sources, rows, ids, profile, counters)
    layers, running = model.geometry.num_layers, int(rows.running.sum())
    # The last layer of a fence runs attention for rows that go on only; the last layer of all for one row.
    assert counters.row_layers == (layers - 1) * running + 1
    middle = layers - 2 * profile.fence_layers
    assert counters.split_row_layers == (int(rows.active.sum()) * middle if name == "combined" else 0)


def test_rows_that_run_leave_fresh_latents_over_stored_ones(model, artifacts):
    """Exactly the protected rows of a relocated document differ from what was stored, beyond the first layer."""
    ids, sources, session = restored(model, artifacts, [*REQUEST, new(20, 3)])
    run = sources[1].run
    rows = Rows(len(ids), torch.ones(len(ids), dtype=torch.bool), torch.zeros(len(ids), dtype=torch.bool))
    rows.protected[run.start + 32 : run.start + 96] = False
    prefill_reusing(model, session, sources, rows, ids, SHIPPED["rowsparse"], Counters())
    segment = next(segment for segment in session.segments if segment.first == run.start)
    stored = artifacts[1].section("layers.2.window")
    same = (segment.layers[2].window == stored).all(-1)
    assert same[32:96].all()
    assert not same[:32].any()
    assert not same[96:].any()
