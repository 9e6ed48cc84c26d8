"""Rankings of known documents' groups: what each scores, what its probe costs, and that it leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redknot.artifact.schema import layer_section
from redknot.build.capture import evaluate
from redknot.errors import DocumentReason, RequestReason
from redknot.model.profile import Profile, load_profile
from redknot.plan.rows import KnownRun, pick_rows, protected_rows
from redknot.runtime.counters import Counters
from redknot.runtime.engine import Engine
from redknot.runtime.model import Model
from redknot.runtime.prefill import prefill
from redknot.runtime.ranking import rank_by_deviation, rank_by_indexer
from redknot.runtime.restore import segmented_session
from redknot.runtime.reuse import choose_rows, prefill_reusing
from tests.kit.memory import nan_memory
from tests.kit.requests import ROOT, WINDOW, Memory, Piece, assemble, document, known, new, restored
from tests.kit.rows import widest
from tests.kit.tiny import tiny_model
from tests.runtime.conftest import Served

DOCS = [document(length, number) for number, length in enumerate((96, 130, 64))]
ALL_WINDOWS = ("latents", "streams:1", "window_all")
REQUEST = [new(5), known(DOCS, 0), new(7, 1), known(DOCS, 1)]
GROUPS = 96 // 4 + -(-130 // 4)
FILE = str(ROOT / "configs/profiles/deviation.json")


@pytest.fixture(scope="module")
def model(served: Served) -> Model:
    return served.model


@pytest.fixture(scope="module")
def artifacts(model: Model) -> list[Memory]:
    return memories(model, DOCS)


@pytest.fixture(scope="module")
def deviation() -> Profile:
    return load_profile(FILE)


def memories(model: Model, documents: Sequence[list[int]]) -> list[Memory]:
    return [Memory(s) for s in evaluate(model, [torch.tensor(ids) for ids in documents], ALL_WINDOWS, Counters())]


def deviations(
    model: Model, artifacts: Sequence[Memory], pieces: list[Piece], layer: int, chunk: int = 1024
) -> tuple[Tensor, Counters]:
    """The ranking of a request over memory that is NaN until something is written there, and what it cost."""
    ids, sources, session = restored(model, artifacts, pieces)
    runs, counters = [source.run for source in sources], Counters()
    scratch = segmented_session(nan_memory(model.geometry), runs, len(ids), 0)
    return rank_by_deviation(model, session, scratch, runs, ids, layer, counters, chunk), counters


# By the indexers


@pytest.mark.parametrize("question", [0, 1, 31, 32, 33, 62, 63, 64, 65, 100])
def test_a_ranking_for_any_question(model, artifacts, question):
    """Also where the question is longer than two windows, so that the probe stands apart from the documents."""
    ids, sources, session = restored(model, artifacts, [*REQUEST, *([new(question, 3)] if question else [])])
    counters = Counters()
    ranking = rank_by_indexer(model, session, [source.run for source in sources], ids, counters)
    assert ranking.shape == (GROUPS,)
    assert ranking.isfinite().all()
    assert bool((ranking > 0).any()) == (question > 0)
    rows = min(question, WINDOW)
    assert counters.probe_row_layers == rows * model.geometry.num_layers  # the last layer is CSA
    assert counters.row_layers == 0


# By deviation


def naive_deviations(
    model: Model, ids: Tensor, runs: Sequence[KnownRun], artifacts: Sequence[Memory], layer: int
) -> list[float]:
    """Row by row: a whole segment-grouped recompute of the request against what the artifacts hold."""
    session = segmented_session(nan_memory(model.geometry), runs, len(ids), 0)
    prefill(model, [session], [ids], Counters())
    group, scores = model.geometry.csa_ratio, []
    for run in runs:
        (segment,) = [segment for segment in session.segments if segment.first == run.start]
        fresh = segment.layers[layer].window
        stored = artifacts[int(run.artifact_id)].section(layer_section(layer, "window"))
        for lo in range(0, run.length, group):
            rows = range(lo, min(lo + group, run.length))
            scores.append(sum(float((fresh[row] - stored[run.doc_start + row]).square().sum()) for row in rows))
    return scores


def agree(found: Tensor, expected: list[float]) -> bool:
    """Latents are normed to a mean square near 1, so 1e-5 is what float32 leaves of a difference that is none."""
    wanted = torch.tensor(expected)
    assert found.shape == wanted.shape
    return torch.allclose(found, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("layer", range(5))
def test_deviation_is_the_distance_to_a_whole_recompute(model, artifacts, layer):
    pieces = [*REQUEST, known(DOCS, 1, 32, 96), known(DOCS, 2), new(20, 3)]
    ids, runs = assemble(pieces)
    expected = naive_deviations(model, ids, runs, artifacts, layer)
    for chunk in (1024, 64, 1):  # at least one block
        assert agree(deviations(model, artifacts, pieces, layer, chunk)[0], expected)


@cache
def tiny(shape: str) -> tuple[Model, list[list[int]], list[Memory]]:
    torch.manual_seed(3)
    model = tiny_model(shape)
    documents = [torch.randint(0, 50, (length,)).tolist() for length in (70, 133, 259)]
    return model, documents, memories(model, documents)


@st.composite
def tiny_requests(draw: st.DrawFn) -> tuple[str, list[Piece], int, int]:
    """A model, runs of documents from any block on with new text between or not, a layer, and a chunk."""
    shape = draw(st.sampled_from(["nano", "flash", "odd"]))
    model, documents, _ = tiny(shape)
    block = model.geometry.block_length
    pieces = []
    for number in draw(st.lists(st.integers(0, 2), min_size=1, max_size=3)):
        if gap := draw(st.sampled_from([0, 1, 9])):
            pieces.append(Piece(list(range(gap))))
        length = len(documents[number])
        start = draw(st.integers(0, (length - 1) // block)) * block
        pieces.append(known(documents, number, start, draw(st.integers(start + 1, length))))
    if question := draw(st.sampled_from([0, 1, 20])):
        pieces.append(Piece(list(range(question))))
    return shape, pieces, draw(st.integers(0, model.geometry.num_layers - 1)), draw(st.sampled_from([1, 1024]))


@given(tiny_requests())
@settings(max_examples=40)
def test_deviation_of_any_request_on_any_geometry(case):
    shape, pieces, layer, chunk = case
    model, _, artifacts = tiny(shape)
    ids, runs = assemble(pieces)
    found, counters = deviations(model, artifacts, pieces, layer, chunk)
    assert agree(found, naive_deviations(model, ids, runs, artifacts, layer))
    assert counters.probe_row_layers == runs[-1].stop * layer


def test_nothing_deviates_in_the_first_layer(model, artifacts, deviation):
    """Its latents are of the token and its place in the document: all groups tie, so the lowest positions win."""
    ids, sources, _ = restored(model, artifacts, [*REQUEST, new(20, 3)])
    runs = [source.run for source in sources]
    ranking, _ = deviations(model, artifacts, [*REQUEST, new(20, 3)], 0)
    assert float(ranking.max()) <= 1e-9  # rounding of a product over other rows
    protected = protected_rows(len(ids), runs, deviation, WINDOW, 4)
    rows = pick_rows(len(ids), runs, protected, ranking.round(decimals=6), deviation, 4, 16)
    budget = (96 + 130) // 10 // 4 * 4
    assert rows.active.nonzero().flatten().tolist() == list(range(5, 5 + budget))


def test_before_a_compressed_layer_only_the_first_rows_deviate(model, artifacts):
    """Layer 0 slides: in layer 1 a row deviates where its window reaches out of the document, later rows do not."""
    ranking, _ = deviations(model, artifacts, [new(40), known(DOCS, 1), new(9)], 1)
    assert float(ranking[: WINDOW // 4].min()) > 1e-3
    assert float(ranking[WINDOW // 4 :].max()) <= 1e-9
    # Behind HCA and CSA every later row may see the other text.
    ranking, _ = deviations(model, artifacts, [new(40), known(DOCS, 1), new(9)], 4)
    assert float(ranking.min()) > 1e-3


@pytest.mark.parametrize("layer", range(5))
def test_an_exact_prefix_does_not_deviate(model, artifacts, layer):
    ranking, _ = deviations(model, artifacts, [known(DOCS, 0), known(DOCS, 1), new(20)], layer)
    assert float(ranking[:24].max()) <= 1e-6
    assert bool((ranking[24:] > 1e-3).any()) == (layer > 0)


@pytest.mark.parametrize("question", [0, 20, 400])
def test_what_the_deviation_probe_costs(model, artifacts, question):
    """Rows up to the last known one; in the layer itself they only leave their latents."""
    pieces = [*REQUEST, *([new(question, 3)] if question else [])]
    rows, geometry = 5 + 96 + 7 + 130, model.geometry
    flops = 0
    for layer in range(geometry.num_layers):
        _, counters = deviations(model, artifacts, pieces, layer, 64)
        assert counters.row_layers == counters.entries_refreshed == 0
        assert counters.probe_row_layers == rows * layer
        assert counters.flops > flops
        flops = counters.flops
    hc, hidden = geometry.hc_mult, geometry.hidden_size
    _, counters = deviations(model, artifacts, pieces, 0)
    streams = 2 * rows * hc * hidden * (hc * (hc + 2) + 1)
    assert counters.flops == 2 * rows * hidden * (geometry.head_dim + geometry.q_lora_rank) + streams


# Both


@pytest.mark.parametrize("name", ["rowsparse", FILE], ids=["indexer", "deviation"])
def test_a_probe_does_not_touch_the_session(model, artifacts, name):
    ids, sources, session = restored(model, artifacts, [*REQUEST, new(20, 3)])
    before = [held.window.clone() for segment in session.segments for held in segment.layers]
    counters = Counters()
    choose_rows(model, session, [source.run for source in sources], ids, load_profile(name), counters)
    assert counters.probe_row_layers > 0
    after = [held.window for segment in session.segments for held in segment.layers]
    assert all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(before, after, strict=True))
    assert session.tails == {}


# The profile


def test_the_groups_that_deviate_most_run(model, artifacts, deviation):
    ids, sources, session = restored(model, artifacts, [*REQUEST, new(20, 3)])
    runs = [source.run for source in sources]
    ranking, _ = deviations(model, artifacts, [*REQUEST, new(20, 3)], deviation.deviation_layer)
    rows = choose_rows(model, session, runs, ids, deviation, Counters())
    groups = [list(range(lo, min(lo + 4, run.stop))) for run in runs for lo in range(run.start, run.stop, 4)]
    assert rows.active[groups[int(ranking.argmax())]].all()
    assert 0 < int(rows.active.sum()) <= (96 + 130) // 10
    assert int(rows.protected.sum()) == len(ids) - 96 - 130  # no windows, no indexed share


def test_a_budget_of_everything_is_segment_grouped_recompute(model, artifacts, deviation):
    """Identity (b), the rows admitted by the ranking."""
    everything = deviation.model_copy(update={"budget": 1.0})
    for pieces in ([*REQUEST, new(20, 3)], [known(DOCS, 2), *REQUEST], [known(DOCS, 1, 32), known(DOCS, 1)]):
        ids, sources, session = restored(model, artifacts, pieces)
        runs, counters = [source.run for source in sources], Counters()
        rows = choose_rows(model, session, runs, ids, everything, counters)
        assert rows.running.all()
        logits = prefill_reusing(model, session, sources, rows, ids, everything, counters)
        reference = segmented_session(nan_memory(model.geometry), runs, len(ids), 4)
        assert widest(logits, prefill(model, [reference], [ids], Counters())[0]) <= 1e-4
        for mine, its in zip(session.segments, reference.segments, strict=True):
            for found, wanted in zip(mine.layers, its.layers, strict=True):
                assert mine.length == its.length
                if not mine.length:  # behind a known run that ends the request, before anything is decoded
                    continue
                assert widest(found.window[: mine.length], wanted.window[: mine.length]) <= 1e-4


def test_the_deviation_baseline_serves(served, deviation):
    """In the second layer of these five; the file's fourth is for models with more behind it."""
    deviation = deviation.model_copy(update={"deviation_layer": 2})
    engine = Engine(served.checkpoint, served.store, deviation)
    request = {"segments": [*served.documents[:2], document(20, 7)], "max_new_tokens": 4}
    first, second = engine.generate(**request), engine.generate(**request)
    report = first.report
    assert (report.arm, report.reason, report.profile) == ("reuse", None, "deviation")
    assert report.profile_digest == deviation.digest()
    assert [found.reason for found in report.documents] == [None, None]
    assert report.reused_tokens == sum(found.reused for found in report.documents) >= 0.9 * (96 + 130)
    assert report.counters.probe_row_layers == (1 + 96 + 130) * 2
    assert second.token_ids == first.token_ids
    assert second.report.counters == report.counters


def test_a_ranking_that_costs_more_than_it_can_save_is_not_worth_it(served):
    """All rows up to layer 4 of 5, to skip at most 4 layers of the documents' rows."""
    engine = Engine(served.checkpoint, served.store, FILE)
    report = engine.generate(segments=[*served.documents[:2], document(20, 7)], max_new_tokens=1).report
    assert (report.arm, report.reason) == ("dense", RequestReason.NOTHING_TO_REUSE)
    assert [found.reason for found in report.documents] == [DocumentReason.NOT_WORTH_IT] * 2
    assert report.counters.probe_row_layers == 0


def test_a_deviation_layer_that_the_model_does_not_have(served, deviation):
    last = served.model.geometry.num_layers - 1
    for layer, reason in ((last, RequestReason.NOTHING_TO_REUSE), (last + 1, RequestReason.UNSUPPORTED_MODEL)):
        profile = deviation.model_copy(update={"deviation_layer": layer})
        engine = Engine(served.checkpoint, served.store, profile)
        report = engine.generate(segments=[*served.documents[:2], document(20, 7)], max_new_tokens=1).report
        assert report.reason is reason
    assert report.detail.endswith(f"deviation_layer {last + 1}, but its layers are 0 to {last}")
