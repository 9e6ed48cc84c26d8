"""Requests on the latent store: equal to plain tensors, shared where they can be, unharmed by moves between tiers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from redknot.build.capture import _evaluate, evaluate
from redknot.latents.session import Session
from redknot.latents.sizing import slot_bytes
from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace
from redknot.model.profile import SHIPPED, Profile
from redknot.plan.rows import KnownRun, Rows, protected_rows
from redknot.runtime import reuse
from redknot.runtime.counters import Counters
from redknot.runtime.model import Model
from redknot.runtime.prefill import decode, prefill
from redknot.runtime.restore import Source, restored_session, segmented_session
from redknot.runtime.reuse import choose_rows, prefill_reusing
from tests.kit.memory import nan_space
from tests.kit.plain import plain_reads, plain_session
from tests.kit.requests import BLOCK, REUSING, WINDOW, Memory, Piece, assemble, document, known, new
from tests.runtime.conftest import Served

DOCS = [document(length, number) for number, length in enumerate((96, 130, 64))]
EVERY_NEED = ("latents", "streams:1", "window_all", "zl:1:0")
REQUEST = [new(5), known(DOCS, 0), new(7, 1), known(DOCS, 1), known(DOCS, 2, 32), known(DOCS, 0), new(20, 3)]
STEPS = 40  # over a block boundary
ARMS = ["dense", *REUSING]


@pytest.fixture(scope="module")
def model(served: Served) -> Model:
    return served.model


@pytest.fixture(scope="module")
def artifacts(model: Model) -> list[Memory]:
    return [Memory(s) for s in evaluate(model, [torch.tensor(ids) for ids in DOCS], EVERY_NEED, Counters())]


def sources_of(artifacts: Sequence[Memory], pieces: Sequence[Piece]) -> tuple[Tensor, list[Source]]:
    """Ids, and sources whose blocks can be shared."""
    ids, runs = assemble(pieces)
    return ids, [
        Source(run, artifacts[int(run.artifact_id)], b"document %s" % run.artifact_id.encode()) for run in runs
    ]


def opened(memory: Workspace, sources: list[Source], total: int, profile: Profile | None) -> Session:
    if profile is not None and profile.reuses_rows:
        return restored_session(memory, sources, total, STEPS)
    runs = [source.run for source in sources] if profile is not None else []
    return segmented_session(memory, runs, total, STEPS)


def answer(
    model: Model,
    session: Session,
    sources: list[Source],
    ids: Tensor,
    profile: Profile | None,
    rows: Rows | None,
    between: Callable[[], None] = lambda: None,
) -> tuple[list[Tensor], list[int]]:
    """Logits of a prefill in chunks of a block and of greedy steps, and the tokens; ``between`` runs in between."""
    if profile is None or rows is None:
        for at in range(BLOCK, len(ids), BLOCK):
            prefill(model, [session], [ids[:at]], Counters(), start=at - BLOCK)
            between()
        logits = [prefill(model, [session], [ids], Counters(), start=(len(ids) - 1) // BLOCK * BLOCK)[0]]
    else:
        native = reuse.forward

        def step(*args: object) -> Tensor:
            between()
            return native(*args)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reuse, "forward", step)
            logits = [prefill_reusing(model, session, sources, rows, ids, profile, Counters(), BLOCK)]
    tokens = [int(logits[0].argmax())]
    for _ in range(STEPS - 1):
        between()
        logits.append(decode(model, [session], torch.tensor(tokens[-1:]), Counters())[0])
        tokens.append(int(logits[-1].argmax()))
    return logits, tokens


# Equality


@pytest.mark.parametrize("arm", ARMS)
def test_a_request_is_what_it_is_on_plain_tensors(model: Model, artifacts: list[Memory], arm: str) -> None:
    """Every arm, prefill and decode, bit for bit; with a store that found the blocks, and with one that did not."""
    profile = SHIPPED.get(arm)
    ids, sources = sources_of(artifacts, REQUEST)
    space, rows, found = nan_space(model.geometry), None, []
    for _ in range(2):
        with Workspace(space) as memory:
            session = opened(memory, sources, len(ids), profile)
            if profile is not None:
                rows = choose_rows(model, session, [source.run for source in sources], ids, profile, Counters())
            found.append(answer(model, session, sources, ids, profile, rows))
        assert space.store.recount() == []
    cut = sources if profile is not None else []
    plain = plain_session(space, cut, len(ids), STEPS, restore=profile is not None and profile.reuses_rows)
    with plain_reads():
        expected, tokens = answer(model, plain, sources, ids, profile, rows)
    for logits, mine in found:
        assert mine == tokens
        assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))
    assert space.store.books()["device"].live == len(space.store._table.index) * space.store.config.block_bytes


def test_sections_are_what_they_are_on_plain_tensors(model: Model) -> None:
    """What artifacts are made of, byte for byte."""
    documents = [torch.tensor(ids) for ids in (*DOCS, document(33, 7), document(1, 8))]
    found = evaluate(model, documents, EVERY_NEED, Counters(), chunk=64)
    with LatentSpace(model.geometry) as space, plain_reads():
        sessions = [plain_session(space, [], len(ids), 0, restore=False) for ids in documents]
        for session in sessions:
            session.segments[0].closed = True
        expected = _evaluate(model, sessions, documents, EVERY_NEED, Counters(), 1, 64, None)
    for mine, its in zip(found, expected, strict=True):
        assert mine.keys() == its.keys()
        assert all(mine[name].dtype == its[name].dtype and torch.equal(mine[name], its[name]) for name in mine)


# Tiers


def move_all(space: LatentSpace, session: Session, disk: bool) -> None:
    """Seal every block of a session, push it out of the device pool, write over all that is free there, and return."""
    store = space.store
    blocks = [segment.blocks for segment in session.segments if segment.blocks is not None]
    places = [(held, number) for held in blocks for number in range(len(held.handles))]
    for held, number in places:
        block = store._table.of(held.handles[number])
        if not block.sealed:
            held.replace(number, store.seal(held.handles[number]).handle)
    if disk:
        names = [[store._table.of(handle).name for handle in held.handles] for held in blocks]
        for held in blocks:
            store.free(held.run)
        assert store.flush()
        store.shrink(len(places))
        assert store.drain()
        taken = scribble(space)
        assert store.counters()["demotions_disk"] > 0
        for held, wanted in zip(blocks, names, strict=True):
            held.run, missing = store.fetch([name for name in wanted if name is not None], 60)
            assert missing == []
        found = [store.handle(held.run, number) for held, number in places]
    else:
        for held, number in places:
            if store._table.of(held.handles[number]).refs == 1:
                while not store.demote(held.handles[number]):
                    store.drain()
        assert store.drain()
        taken = scribble(space)
        found = [store.promote(held.handles[number]) for held, number in places]
    for (held, number), handle in zip(places, found, strict=True):
        held.replace(number, handle)
    assert taken
    assert store.recount() == []


def scribble(space: LatentSpace) -> int:
    """Overwrite every free place of the device pool."""
    run = space.store.allocate("scratch", space.store._table.device.free)
    handles = space.store.handles(run)
    for handle in handles:
        space.store.fill(handle).fill_(255)
    space.store.free(run)
    return len(handles)


@pytest.mark.parametrize("disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("arm", ["dense", "rowsparse", "turbo"])
def test_moves_in_the_middle_of_a_request_change_no_token(
    model: Model, artifacts: list[Memory], arm: str, disk: bool, tmp_path: Path
) -> None:
    """Between prefill chunks and between decode steps every block leaves the device pool and comes back elsewhere."""
    profile = SHIPPED.get(arm)
    ids, sources = sources_of(artifacts, REQUEST[1:])
    nbytes = slot_bytes(LatentSpace(model.geometry).layout)
    sizes = {"device_bytes": 64 * nbytes, "arenas": 2, "disk_folder": tmp_path}
    space = nan_space(model.geometry, **sizes, **{"disk_bytes" if disk else "host_bytes": 400 * (nbytes + 100)})
    results = []
    for moved in (False, True):
        rows, calls = None, []
        with Workspace(space) as memory:
            session = opened(memory, sources, len(ids), profile)
            if profile is not None:
                rows = choose_rows(model, session, [source.run for source in sources], ids, profile, Counters())

            def between(session: Session = session, calls: list[int] = calls, moved: bool = moved) -> None:
                calls.append(1)
                if moved and len(calls) % 5 == 1:
                    move_all(space, session, disk)

            results.append(answer(model, session, sources, ids, profile, rows, between))
    assert results[0][1] == results[1][1]
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))
    counters = space.store.counters()
    assert counters["promotions_disk" if disk else "promotions_host"] > 20
    space.close()


# Sharing


def refreshed_blocks(rows: Rows, run: KnownRun, group: int) -> int:
    """Blocks of a run with a group all of whose rows run, and those of the group before it: from the plan alone."""
    running = rows.running[run.start : run.stop].tolist()
    blocks = set()
    for ratio in (group, BLOCK):
        for lo in range(0, run.length, ratio):
            overlap = lo - ratio if ratio == group and lo else lo
            if all(running[overlap : min(lo + ratio, run.length)]):
                blocks.add(lo // BLOCK)
    return len(blocks)


def test_sixteen_agents_share_a_document(model: Model) -> None:
    """Behind different preambles under turbo: one document, and for each agent its refreshed blocks and its arena."""
    ids = document(10 * BLOCK + 17, 70)
    (sections,) = evaluate(model, [torch.tensor(ids)], SHIPPED["turbo"].needs(), Counters())
    space, profile, geometry = nan_space(model.geometry, arenas=16), SHIPPED["turbo"], model.geometry
    nbytes, blocks = space.store.config.block_bytes, 11
    expected, preambles = 0, [1 + 7 * agent for agent in range(16)]
    with ExitStack() as live:
        sessions = []
        for agent, length in enumerate(preambles):
            pieces = [new(length, agent), known([ids], 0), new(9, 100 + agent)]
            request, runs = assemble(pieces)
            sources = [Source(run, Memory(sections), b"shared") for run in runs]
            memory = live.enter_context(Workspace(space))
            session = restored_session(memory, sources, len(request), 4)
            rows = choose_rows(model, session, runs, request, profile, Counters())
            prefill_reusing(model, session, sources, rows, request, profile, Counters())
            sessions.append((session, memory, rows, runs[0]))
            plan = Rows(
                len(request),
                protected_rows(len(request), runs, profile, geometry.window, geometry.csa_ratio),
                torch.zeros(len(request), dtype=torch.bool),
            )
            copies = refreshed_blocks(plan, runs[0], geometry.csa_ratio)
            assert copies == WINDOW // BLOCK
            own = -(-length // BLOCK) + -(-(9 + 4) // BLOCK)
            expected += (copies + own) * nbytes
            held = memory.held()
            assert (held.found + held.filled, held.copied, held.fresh) == (blocks - copies, copies, own)
        books = space.store.books()
        assert books["device"].live == blocks * nbytes + expected
        assert books["arena"].live == 16 * space.store.config.arena_bytes
        # They go on, each on its own.
        for session, *_ in sessions:
            assert decode(model, [session], torch.tensor([9]), Counters()).isfinite().all()
        assert space.store.books()["device"].live == blocks * nbytes + expected
        assert space.store.recount() == []
        assert space.store.counters()["dedup_collisions"] == 0
    assert space.store.books()["device"].live == blocks * nbytes  # the document stays as cache
    assert space.store.books()["arena"].live == 0


def test_what_is_shared_is_never_written_to(model: Model, artifacts: list[Memory]) -> None:
    ids, sources = sources_of(artifacts, REQUEST)
    space = nan_space(model.geometry)

    def contents() -> dict[object, str]:
        found = {}
        for name in list(space.store._table.index):
            run, missing = space.store.match([name])
            assert missing == []
            found[name] = hashlib.sha256(space.store.view(space.store.handle(run)).numpy().tobytes()).hexdigest()
            space.store.free(run)
        return found

    with Workspace(space) as memory:
        restored_session(memory, sources, len(ids), 0)
    before = contents()
    assert len(before) == 3 + 5 + 2 - 1  # the second document from its second block on: both parts of it once
    for name in REUSING:
        with Workspace(space) as memory:
            session = opened(memory, sources, len(ids), SHIPPED[name])
            rows = choose_rows(model, session, [source.run for source in sources], ids, SHIPPED[name], Counters())
            prefill_reusing(model, session, sources, rows, ids, SHIPPED[name], Counters())
        assert contents() == before, name
