"""From contents to published artifacts: what is stored is what was computed, whatever stops a build."""

from __future__ import annotations

import errno
import os
import signal
import threading

import pytest
import torch

from redknot.artifact.publish import Publication
from redknot.artifact.schema import TEMPORARY_DIR
from redknot.artifact.sections import section_specs
from redknot.artifact.store import ArtifactStore
from redknot.build import builder
from redknot.build.builder import batches, build, evaluate_batch
from redknot.build.contents import Content, tokenise
from redknot.build.documents import CorpusReport, Document
from redknot.build.plan import plan_build
from redknot.errors import StoreError
from redknot.runtime.counters import Counters
from tests.artifact.kit import directory_of, flip, offset_of
from tests.kit.corpus import MAX_POSITIONS, document

LENGTHS = [40, 33, 70, 130, 64]
BATCHES = [["d1", "d0"], ["d4", "d2"], ["d3"]]


def make_contents(tokenizer, texts: list[str]) -> list[Content]:
    made = [Document(f"d{number}", text, f"d{number}") for number, text in enumerate(texts)]
    return tokenise(made, tokenizer, MAX_POSITIONS, CorpusReport()).all


@pytest.fixture(scope="module")
def contents(tokenizer) -> list[Content]:
    return make_contents(tokenizer, [document(length, number) for number, length in enumerate(LENGTHS)])


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(builder, "BATCH_TOKENS", 70)


@pytest.fixture
def store(tmp_path):
    with ArtifactStore(tmp_path / "store", create=True) as opened:
        yield opened


def published(store: ArtifactStore) -> set[str]:
    return {name for row in store.list() for name in store.names(row.artifact_id, row.namespace)}


def is_clean(store: ArtifactStore) -> bool:
    """Nothing half written, every artifact sound."""
    return not os.listdir(store.root / TEMPORARY_DIR) and not any(result.problems for result in store.verify())


def test_batches_hold_similar_lengths(contents):
    made = list(batches(contents, 70))
    assert [[content.names[0] for content in batch] for batch in made] == BATCHES
    assert list(batches([], 70)) == []
    assert [len(batch) for batch in batches(contents, 10_000)] == [5]


def test_what_is_read_back_is_what_was_computed(model, store, draft, target, contents):
    done: list[str] = []
    result = build(model, store, draft, contents, lambda content: done.extend(content.names))
    assert sorted(done) == sorted(published(store)) == [f"d{n}" for n in range(5)]
    assert (result.tokens, len(result.certificates)) == (sum(LENGTHS), 5)
    ids = {certificate.token_hash: certificate.artifact_id for certificate in result.certificates}
    for batch in batches(contents, 70):
        for content, fresh in zip(batch, evaluate_batch(model, draft, batch, Counters()), strict=True):
            artifact = store.load(ids[content.token_hash], draft.namespace)
            specs = section_specs(model.geometry, len(content), draft.needs, draft.world)
            assert artifact.certificate.sections.keys() == fresh.keys() == specs.keys()
            for name, tensor in fresh.items():
                stored = artifact.section(name)
                assert stored.dtype == tensor.dtype
                assert torch.equal(stored, tensor), name


def test_both_ranks_have_their_channels(model, store, draft, contents):
    result = build(model, store, draft, contents[:1])
    sections = result.certificates[0].sections
    width = model.geometry.o_groups * model.geometry.o_lora_rank
    for layer in (1, 2):
        channels = [sections[f"layers.{layer}.zl.r{rank}of2"].channels for rank in range(2)]
        assert channels == [(0, width // 2), (width // 2, width)]


def test_the_next_build_skips_what_is_there(store, draft, target, contents, model):
    build(model, store, draft, contents[:3])
    plan = plan_build(target, store.root, contents, draft)
    assert [present.content for present in plan.present] == contents[:3]
    assert plan.missing == tuple(contents[3:])
    assert plan.planned_bytes == sum(target.nbytes(len(content)) for content in contents[3:])


def test_damage_is_found_and_built_again(store, draft, target, contents, model):
    certificate = build(model, store, draft, contents[:2]).certificates[0]
    path = directory_of(store, certificate) / "latents.0-3.safetensors"
    flip(path, offset_of(path, "layers.1.entries"))
    assert len(plan_build(target, store.root, contents[:2], draft, checked=False).present) == 2
    plan = plan_build(target, store.root, contents[:2], draft)
    assert [content.token_hash for content in plan.missing] == [certificate.token_hash]
    assert build(model, store, draft, plan.missing).certificates[0].generation == 2
    assert is_clean(store)


@pytest.mark.parametrize("which", ["namespace", "needs", "world"])
def test_an_artifact_for_something_else_is_not_there(store, draft, target, contents, model, which):
    build(model, store, draft, contents[:1])
    fewer = tuple(need for need in draft.needs if not need.startswith("zl"))
    other = {"namespace": ("namespace", "b"), "needs": ("needs", (*draft.needs, "zzz")), "world": ("world", 1)}[which]
    changed = type(draft)(**(vars(draft) | dict([other])))
    assert plan_build(target, store.root, contents[:1], changed).present == ()
    covered = type(draft)(**(vars(draft) | {"needs": fewer, "world": 1}))
    assert len(plan_build(target, store.root, contents[:1], covered).present) == 1


def test_another_builder_meanwhile(model, store, draft, contents, monkeypatch):
    """Published by somebody else between plan and evaluation: taken, not built twice, names kept."""
    build(model, store, draft, contents[:1])
    renamed = [type(content)(("mine",), "s", content.token_ids, content.token_hash) for content in contents[:1]]
    result = build(model, store, draft, renamed)
    assert result.certificates == []
    assert [present.content for present in result.elsewhere] == renamed
    assert published(store) == {"d0", "mine"}


def test_an_interrupt_keeps_what_was_evaluated(model, store, draft, target, contents, monkeypatch):
    native = builder.evaluate_batch
    calls = []

    def interrupted(*args: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return native(*args)

    monkeypatch.setattr(builder, "evaluate_batch", interrupted)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with pytest.raises(KeyboardInterrupt):
        build(model, store, draft, contents)
    assert published(store) == {"d1", "d0", "d4", "d2"}
    assert is_clean(store)
    plan = plan_build(target, store.root, contents, draft)
    assert [content.names for content in plan.missing] == [("d3",)]


def test_a_second_interrupt_drops_what_waits(model, store, draft, contents, monkeypatch):
    native, dropped = store.publish_many, threading.Event()

    def slow(items):
        assert dropped.wait(60)
        return native(items)

    def interrupted_again() -> None:
        publisher._pending[1].add_done_callback(lambda future: dropped.set())
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "publish_many", slow)
    publisher = builder._Publisher(store, draft, builder.BuildResult(), lambda content: None)
    monkeypatch.setattr(publisher, "_finish", interrupted_again)
    with publisher:
        for batch in list(batches(contents, 70))[:2]:
            publisher.submit(batch, evaluate_batch(model, draft, batch, Counters()))
        with pytest.raises(KeyboardInterrupt):
            publisher.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        monkeypatch.undo()
        publisher._pending.clear()
    assert published(store) == {"d1", "d0"}
    assert is_clean(store)


@pytest.mark.parametrize("at", range(0, 25, 6))
def test_a_full_disk_stops_the_build_with_its_reason(model, store, draft, target, contents, monkeypatch, at):
    native, count = os.writev, 0

    def full(descriptor, buffers):
        nonlocal count
        count += 1
        if count > at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return native(descriptor, buffers)

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(StoreError, match=r"ENOSPC.*No space left"):
        build(model, store, draft, contents)
    monkeypatch.undo()
    assert is_clean(store)
    before = published(store)
    assert before < {f"d{n}" for n in range(5)}
    monkeypatch.setattr(builder, "BATCH_TOKENS", 70)
    build(model, store, draft, plan_build(target, store.root, contents, draft).missing)
    assert published(store) == {f"d{n}" for n in range(5)}
    assert is_clean(store)


def test_a_failed_evaluation_leaves_what_was_published(model, store, draft, contents, monkeypatch):
    native, on_disk = builder.evaluate_batch, threading.Barrier(2)

    def failing(model_, draft_, batch, *more):
        if len(batch[0]) > 100:
            on_disk.wait(60)
            raise MemoryError
        return native(model_, draft_, batch, *more)

    def on_done(content: Content) -> None:
        if content.names == ("d2",):  # the last one of the two batches before
            on_disk.wait(60)

    monkeypatch.setattr(builder, "evaluate_batch", failing)
    with pytest.raises(MemoryError):
        build(model, store, draft, contents, on_done)
    assert published(store) == {"d1", "d0", "d4", "d2"}
    assert is_clean(store)


def test_few_batches_wait_for_the_disk(model, draft, contents):
    """A disk slower than the model must not fill the memory."""
    release, waiting, seen = threading.Event(), [], []

    class Slow:
        def publish_many(self, items: list[Publication]) -> tuple[()]:
            release.wait(60)
            return ()

    publisher = builder._Publisher(Slow(), draft, builder.BuildResult(), lambda content: seen.append(content))  # type: ignore[arg-type]

    def fill() -> None:
        with publisher:
            for _ in range(10):
                publisher.submit(contents[:1], [{}])
                waiting.append(1)

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    assert len(waiting) <= builder._WAITING
    release.set()
    thread.join(60)
    assert len(seen) == 10


def test_identical_contents_are_one(tokenizer):
    made = make_contents(tokenizer, [document(40), document(41), document(40)])
    assert [content.names for content in made] == [("d0", "d2"), ("d1",)]


def test_documents_that_cannot_be_built(tokenizer):
    report = CorpusReport()
    texts = {"long": document(MAX_POSITIONS + 1), "fits": document(MAX_POSITIONS), "lone": "a\ud800b"}
    texts["huge"] = document(100) * 100_000  # refused by what its beginning shows: all of it would take minutes
    made = tokenise([Document(name, text, f"{name}.txt") for name, text in texts.items()], tokenizer, 600, report)
    assert [content.names for content in made.all] == [("fits",)]
    assert [str(problem) for problem in report.problems] == [
        "long.txt: 601 tokens, the model has 600 positions",
        "lone.txt: text holds a lone surrogate, which no UTF-8 file can hold",
        "huge.txt: more than 600 tokens, the model has 600 positions",
    ]
