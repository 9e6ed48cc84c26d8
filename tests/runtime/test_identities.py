"""The identities that reuse rests on, and that nothing but what was stored or ran is ever read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from redknot.artifact.schema import boundary_section, layer_section, shard_section
from redknot.artifact.sections import middle_layers, section_specs
from redknot.artifact.store import ArtifactStore
from redknot.build.capture import evaluate
from redknot.latents.segment import Segment
from redknot.latents.session import Session
from redknot.model.heads import fixed_table
from redknot.model.profile import SHIPPED, Profile, load_profile
from redknot.plan.rows import KnownRun, Rows
from redknot.runtime.capture import Capture
from redknot.runtime.counters import Counters
from redknot.runtime.forward import forward
from redknot.runtime.model import Model
from redknot.runtime.prefill import CHUNK_ROWS, decode, dense_session, prefill
from redknot.runtime.restore import Source, restored_session, segmented_session
from redknot.runtime.reuse import Stages, choose_rows, prefill_reusing
from tests.kit.memory import nan_memory
from tests.kit.naive import naive_forward
from tests.kit.requests import (
    BLOCK,
    BOS,
    REUSING,
    ROOT,
    Memory,
    Piece,
    assemble,
    document,
    known,
    new,
    publish,
)
from tests.kit.rows import every_row, widest
from tests.kit.rows import segmented_session as given_session
from tests.runtime.conftest import Served

LENGTHS = (1, 3, 4, 31, 32, 33, 127, 128, 129, 255, 257)
DOCS = [document(length, number) for number, length in enumerate(LENGTHS)]
EVERY_NEED = ("latents", "streams:1", "window_all", "zl:1:0")
EXACT = 1e-4
START = Piece([BOS])

LAYOUTS: dict[str, list[Piece]] = {
    "in order": [START, *(known(DOCS, number) for number in range(len(DOCS))), new(20)],
    "backwards, text between": [
        START,
        *(piece for number in reversed(range(3, 9)) for piece in (known(DOCS, number), new(number, number))),
    ],
    "twice": [known(DOCS, 5), known(DOCS, 8), new(5), known(DOCS, 8), known(DOCS, 5), new(70)],
    "parts": [
        new(7),
        known(DOCS, 10, 64, 192),
        known(DOCS, 9, 128),
        known(DOCS, 7, 0, 96),
        known(DOCS, 10, 224),
        known(DOCS, 10, 0, 32),
        new(33),
    ],
    "ends in a document": [known(DOCS, 6), new(3), known(DOCS, 5)],
    "a document and nothing else": [known(DOCS, 8)],
}


def profiles() -> list[Profile]:
    shipped = [profile for profile in SHIPPED.values() if profile.reuses]
    return [*shipped, *(load_profile(str(ROOT / f"configs/profiles/{name}.json")) for name in ("plain", "deviation"))]


@pytest.fixture(scope="module")
def model(served: Served) -> Model:
    return served.model


@pytest.fixture(scope="module")
def artifacts(model: Model) -> list[Memory]:
    return memories(model, DOCS)


def memories(model: Model, documents: Sequence[list[int]], needs: tuple[str, ...] = EVERY_NEED) -> list[Memory]:
    return [Memory(s) for s in evaluate(model, [torch.tensor(ids) for ids in documents], needs, Counters())]


def sources_of(runs: Sequence[KnownRun], artifacts: Sequence[Memory]) -> list[Source]:
    return [Source(run, artifacts[int(run.artifact_id)]) for run in runs]


def grouped(
    model: Model,
    ids: Tensor,
    runs: Sequence[KnownRun],
    capture: Capture | None = None,
    room: int = 0,
    chunk: int = CHUNK_ROWS,
) -> tuple[Tensor, Session]:
    """Segment-grouped recompute: last logits and the session."""
    session = segmented_session(nan_memory(model.geometry), runs, len(ids), room)
    return prefill(model, [session], [ids], Counters(), chunk=chunk, capture=capture)[0], session


def latents(session: Session, model: Model) -> list[Tensor]:
    """All that a session's segments hold, layer by layer."""
    found = []
    for segment in session.segments:
        for layer, held in enumerate(segment.layers):
            ratio = model.geometry.ratio(layer)
            found.append(held.window[: segment.length])
            found += [paged[: segment.entries(ratio)] for paged in (held.entries, held.index_keys) if paged]
    return found


def everything(total: int) -> Rows:
    return Rows(total, torch.ones(total, dtype=torch.bool), torch.zeros(total, dtype=torch.bool))


def reuse(
    model: Model,
    ids: Tensor,
    sources: list[Source],
    profile: Profile,
    rows: Rows | None = None,
    chunk: int = 1024,
    room: int = 0,
) -> tuple[Tensor, Session, Rows]:
    """One request through the profile, over memory that is NaN until something is written there."""
    counters = Counters()
    runs = [source.run for source in sources]
    memory = nan_memory(model.geometry)
    if profile.reuses_rows:
        session = restored_session(memory, sources, len(ids), room)
    else:
        session = segmented_session(memory, runs, len(ids), room)
    rows = rows or choose_rows(model, session, runs, ids, profile, counters)
    logits = prefill_reusing(model, session, sources, rows, ids, profile, counters, chunk)
    return logits, session, rows


# (b)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_row_protected_equals_segment_grouped_recompute(model, artifacts, layout):
    """Identity (b): logits and every latent of every layer, for every profile and several chunkings.

    Where two experts or entries are nearly tied, products of other shapes choose the other, in recompute too: one of
    two runs of it must be met, and met everywhere.
    """
    ids, runs = assemble(LAYOUTS[layout])
    references = [grouped(model, ids, runs, chunk=chunk) for chunk in (CHUNK_ROWS, 256)]
    assert references[0][0].std() > 0.5
    sources = sources_of(runs, artifacts)
    for name, chunk in zip(REUSING, (100, 1024, 32, 100), strict=True):
        logits, session, _ = reuse(model, ids, sources, SHIPPED[name], everything(len(ids)), chunk)
        found = [logits, *latents(session, model)]
        farthest = [
            max(widest(*pair) for pair in zip(found, [expected, *latents(held, model)], strict=True) if pair[1].numel())
            for expected, held in references
        ]
        assert min(farthest) <= EXACT, (name, chunk, farthest)


@pytest.mark.parametrize("layout", ["parts", "twice"])
def test_segment_grouping_is_what_its_definition_says(model, layout):
    """The right-hand side of (b), against whole sequences and dense masks."""
    pieces = LAYOUTS[layout]
    ids, runs = assemble(pieces)
    expected = naive_forward(model, ids, [len(piece.ids) for piece in pieces])[-1]
    assert widest(grouped(model, ids, runs)[0], expected) <= EXACT


# (c)


@pytest.mark.parametrize("lengths", [(96, 40), (32, 64, 128, 40), (64, 32, 32)], ids=str)
@pytest.mark.parametrize("name", REUSING)
def test_whole_blocks_equal_native(model, name, lengths):
    """Identity (c): segments on block boundaries, the overlap carried over seams, no partial entry at the end."""
    documents = [document(length, 20 + number) for number, length in enumerate(lengths[:-1])]
    pieces = [*(known(documents, number) for number in range(len(documents))), new(lengths[-1], 77)]
    ids, runs = assemble(pieces)
    native = prefill(model, [dense_session(nan_memory(model.geometry), len(ids), len(ids))], [ids], Counters())[0]
    assert widest(grouped(model, ids, runs)[0], native) <= EXACT
    made = memories(model, documents)
    logits, _, _ = reuse(model, ids, sources_of(runs, made), SHIPPED[name], everything(len(ids)))
    assert widest(logits, native) <= EXACT


# (d)


@pytest.mark.parametrize(("length", "chunk"), [(32, 1024), (128, 1024), (128, 64), (256, 96)], ids=str)
def test_a_document_at_zero_is_a_fresh_prefill_bit_for_bit(model, length, chunk):
    """Identity (d)."""
    ids = torch.tensor(document(length, 30))
    (stored,) = evaluate(model, [ids], EVERY_NEED, Counters(), chunk=chunk)
    session = dense_session(nan_memory(model.geometry), length, length)
    prefill(model, [session], [ids], Counters(), chunk=chunk)
    for layer, held in enumerate(session.segments[0].layers):
        assert torch.equal(stored[layer_section(layer, "window")], held.window)
        if ratio := model.geometry.ratio(layer):
            assert torch.equal(stored[layer_section(layer, "entries")], held.entries[: length // ratio])
        if held.index_keys:
            assert torch.equal(stored[layer_section(layer, "index_keys")], held.index_keys[: length // ratio])
    # Whatever follows in the same chunks does not change what is there.
    if length % chunk == 0:
        longer = dense_session(nan_memory(model.geometry), length + 40, length + 40)
        prefill(model, [longer], [torch.cat((ids, torch.tensor(document(40, 31))))], Counters(), chunk=chunk)
        for mine, its in zip(session.segments[0].layers, longer.segments[0].layers, strict=True):
            assert torch.equal(mine.window, its.window[:length])


# (e)


def test_what_is_read_back_is_what_was_written_bit_for_bit(served, tmp_path):
    """Identity (e), for the needs of all profiles together."""
    documents = [DOCS[0], DOCS[6], DOCS[10]]
    certificates = publish(served.checkpoint, tmp_path / "store", documents)
    needs = certificates[0].needs
    fresh = evaluate(served.model, [torch.tensor(ids) for ids in documents], needs, Counters())
    with ArtifactStore(tmp_path / "store") as store:
        for certificate, sections, ids in zip(certificates, fresh, documents, strict=True):
            loaded = store.load(certificate.artifact_id, "default")
            assert sections.keys() == section_specs(served.model.geometry, len(ids), needs).keys()
            for name, tensor in sections.items():
                assert loaded.section(name).dtype == tensor.dtype
                assert torch.equal(loaded.section(name), tensor), name


# Head split, skipped rows: exact when what is restored comes from the same context


def behind(values: Tensor, rows: int) -> Tensor:
    """The values behind that many rows of the document which the run leaves out: nobody may read those."""
    return torch.cat((values.new_full((rows, values.shape[1]), float("nan")), values))


def cut_out(model: Model, ids: Tensor, runs: Sequence[KnownRun]) -> tuple[Tensor, list[Memory]]:
    """Segment-grouped recompute, and per run an "artifact" of the very values it computed, float32."""
    geometry = model.geometry
    middle = middle_layers(geometry, 1)
    capture = Capture(fixed_table(geometry, (0,)), middle, stream_layer=geometry.num_layers - 1)
    expected, session = grouped(model, ids, runs, capture)
    streams, z = torch.cat(capture.streams), {layer: torch.cat(capture.z_local[layer]) for layer in middle}
    by_start = {segment.first: segment for segment in session.segments}
    made = []
    for run in runs:
        held, rows = by_start[run.start].layers, slice(run.start, run.stop)
        sections = {boundary_section("streams"): behind(streams[rows].flatten(1), run.doc_start)}
        sections |= {shard_section(layer, "zl", 0, 1): behind(z[layer][rows], run.doc_start) for layer in middle}
        for layer, one in enumerate(held):
            skipped = run.doc_start // (geometry.ratio(layer) or 1)
            sections[layer_section(layer, "window")] = behind(one.window[: run.length], run.doc_start)
            for kind, paged in (("entries", one.entries), ("index_keys", one.index_keys)):
                if paged:
                    sections[layer_section(layer, kind)] = behind(paged[:], skipped)
        made.append(Memory(sections))
    return expected, made


@pytest.mark.parametrize("layout", ["in order", "twice", "ends in a document"])
def test_values_of_the_same_context_change_nothing(model, layout):
    """Z_L computed in this very request equals the unsplit layers (1e-5); so do restored latents and streams.

    Rows really are skipped, restored and split here: what is exact is only where their values come from. The last
    rows of every document run, because a segment's first CSA group has no overlap from rows that did not.
    """
    ids, found = assemble([START, *LAYOUTS[layout]])
    runs = [  # every other one as if it were the rest of a longer document
        replace(run, doc_start=64 * (number % 2), doc_length=64 * (number % 2) + run.length)
        for number, run in enumerate(found)
    ]
    expected, made = cut_out(model, ids, runs)
    sources = [Source(run, memory) for run, memory in zip(runs, made, strict=True)]
    for number, profile in enumerate(profiles()):
        if profile.protected.last_windows or not profile.reuses_rows:
            logits, _, rows = reuse(model, ids, sources, profile, chunk=(1024, 48)[number % 2])
            assert not bool(rows.running.all())
            assert widest(logits, expected) <= (1e-5 if profile.name == "headsplit" else EXACT), profile.name


# Relocation


@pytest.mark.parametrize("shift", [0, 1, 3, 4, 127, 128, 129, 1000, 65_536, 1_048_576 - 241])
def test_relocation_changes_nothing(model, shift):
    """A session whose segments' frames begin far away, and one that lies far away: the same logits in every row."""
    ids = torch.tensor(document(240, 40))
    lengths = (37, 96, 33, 74)
    expected = every_row(model, ids, session=given_session(model, lengths))
    frames = given_session(model, lengths, [shift] * len(lengths))
    assert widest(every_row(model, ids, (100,), frames), expected) <= EXACT * float(expected.abs().max())
    mixed = given_session(model, lengths, [shift * (number % 2) for number in range(len(lengths))])
    assert widest(every_row(model, ids, session=mixed), expected) <= EXACT * float(expected.abs().max())


@pytest.mark.parametrize(("name", "offset"), [("headsplit", 1), ("rowsparse", 127), ("turbo", 65_536), ("combined", 3)])
def test_a_whole_request_further_on_is_the_same(model, artifacts, name, offset):
    """Documents restored at any offset: what runs depends on distances only."""
    pieces, profile = [new(9), known(DOCS, 9), new(3), known(DOCS, 6), new(20)], SHIPPED[name]
    ids, runs = assemble(pieces)
    expected, _, rows = reuse(model, ids, sources_of(runs, artifacts), profile)
    _, runs = assemble(pieces, offset)
    sources, blank = sources_of(runs, artifacts), torch.zeros(offset, dtype=torch.bool)
    memory = nan_memory(model.geometry)
    if profile.reuses_rows:
        session = restored_session(memory, sources, offset + len(ids), 0)
    else:
        session = segmented_session(memory, runs, offset + len(ids), 0)
    session.segments[0] = Segment(offset, 0, 9, closed=True)  # nothing is in front of the request
    memory.allocate(session.segments[0], 9)
    moved = Rows(offset + len(ids), torch.cat((blank, rows.protected)), torch.cat((blank, rows.active)))
    stages = Stages(model, session, sources, moved, torch.cat((blank.long(), ids)), profile)
    with torch.inference_mode():
        found = forward(model, stages.of(offset, offset + len(ids)), Counters())[-1]
    assert widest(found, expected) <= EXACT


# Unset memory


@cache
def shapes() -> dict[str, list[Piece]]:
    """Requests whose edges lie everywhere, in whole documents only."""
    found = {name: pieces for name, pieces in LAYOUTS.items() if name not in ("parts", "in order")}
    found["ends of documents"] = [new(3), known(DOCS, 9, 128), known(DOCS, 10, 224), known(DOCS, 7, 96), new(9)]
    for number in (7, 9):  # whose last groups have four rows and three
        found[f"ends in document {number}"] = [START, known(DOCS, number)]
    for question in (1, 32, 63, 100):
        found[f"question of {question}"] = [START, known(DOCS, 8), known(DOCS, 6), new(question)]
    for gap in (3, 40):
        found[f"{gap} between"] = [START, known(DOCS, 7), new(gap), known(DOCS, 4), new(gap, 5), known(DOCS, 9), new(9)]
    return found


@pytest.mark.parametrize("name", [profile.name for profile in profiles()])
def test_unset_memory_never_leaks(model, name):
    """Each profile over artifacts that hold exactly what it needs; everything else is NaN."""
    profile = next(profile for profile in profiles() if profile.name == name)
    made = memories(model, DOCS, profile.needs())
    for shape, pieces in shapes().items():
        ids, runs = assemble(pieces)
        runs = [run for run in runs if run.length >= BLOCK]
        logits, session, _ = reuse(model, ids, sources_of(runs, made), profile, chunk=64, room=5)
        assert logits.isfinite().all(), shape
        # And neither does what is decoded from it.
        for token in document(5, 3):
            assert decode(model, [session], torch.tensor([token]), Counters()).isfinite().all(), shape


def test_parts_of_documents_never_leak_either(model, artifacts):
    ids, runs = assemble(LAYOUTS["parts"])
    for profile in profiles():
        logits, _, _ = reuse(model, ids, sources_of(runs, artifacts), profile, chunk=64)
        assert logits.isfinite().all(), profile.name


# Decode behind a closed segment


def test_tokens_behind_a_document_that_ends_the_prompt(model):
    """Decode opens a segment of its own, as the definition of segment grouping says."""
    more = document(9, 50)
    documents = [document(37, 51), document(66, 52)]
    ids, runs = assemble([new(3), known(documents, 0), known(documents, 1)])
    expected = naive_forward(model, torch.cat((ids, torch.tensor(more))), (3, 37, 66, len(more)))
    first, session = grouped(model, ids, runs, room=len(more))
    assert widest(first, naive_forward(model, ids, (3, 37, 66, 0))[-1]) <= EXACT
    for number, token in enumerate(more):
        found = decode(model, [session], torch.tensor([token]), Counters())[0]
        assert widest(found, expected[len(ids) + number]) <= EXACT


# What is stored stays what it is


def digest_of(store: Path) -> dict[str, str]:
    files = sorted(path for path in (store / "objects").rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_sections_are_never_written_to(model, artifacts):
    before = [{name: tensor.clone() for name, tensor in memory.sections.items()} for memory in artifacts]
    ids, runs = assemble(LAYOUTS["twice"])
    for profile in profiles():
        reuse(model, ids, sources_of(runs, artifacts), profile)
    for memory, then in zip(artifacts, before, strict=True):
        assert all(torch.equal(memory.sections[name], tensor) for name, tensor in then.items())


@pytest.mark.parametrize("name", ["combined", "turbo"])
def test_requests_leave_the_store_alone_and_repeat(served, name):
    engine, before = served.engine(name), digest_of(served.store)
    segments = [*served.documents[:2], document(9, 8), served.documents[0], document(20, 9)]
    first, second = (engine.generate(segments=segments, max_new_tokens=6) for _ in range(2))
    assert first.report.arm == "reuse"
    assert first.token_ids == second.token_ids
    assert first.report.counters == second.report.counters
    assert first.report.documents == second.report.documents
    assert digest_of(served.store) == before
