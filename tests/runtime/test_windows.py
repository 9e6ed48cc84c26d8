"""Window rows that artifacts do not keep: recomputed ones against stored ones, at every edge, and what they cost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from redknot.artifact.needs import WindowKind, Windows
from redknot.build.capture import evaluate
from redknot.latents.session import Session
from redknot.latents.workspace import Workspace
from redknot.model.profile import SHIPPED
from redknot.plan.rows import KnownRun
from redknot.plan.windows import Rebuild, checkpoint_before, window_plan
from redknot.runtime.counters import Counters
from redknot.runtime.model import Model
from redknot.runtime.restore import Source, restored_session
from redknot.runtime.reuse import choose_rows, prefill_reusing
from redknot.runtime.windows import rebuild_windows
from tests.kit.memory import nan_memory, nan_space
from tests.kit.requests import BLOCK, WINDOW, Memory, document, known, new, restored
from tests.kit.rows import widest
from tests.kit.tiny import tiny_model
from tests.runtime.conftest import Served

NONE = Windows(WindowKind.NONE)
ALL = Windows(WindowKind.ALL)
EVERY = {str(windows): windows for windows in (NONE, *(Windows(WindowKind.CHECKPOINTS, k) for k in (1, 2, 3, 16)))}
strategies = st.sampled_from(sorted(EVERY))


@pytest.fixture(scope="module")
def model(served: Served) -> Model:
    return served.model


MADE: dict[tuple[int, int, Windows], tuple[Model, Memory]] = {}  # the model lives as long as its id is a key


def sections(model: Model, length: int, windows: Windows) -> Memory:
    """The artifact of a document, made once."""
    key = (id(model), length, windows)
    if key not in MADE:
        needs = tuple(sorted(("latents", windows.need)))
        MADE[key] = model, Memory(evaluate(model, [token_ids(model, length)], needs, Counters())[0])
    return MADE[key][1]


def token_ids(model: Model, length: int) -> Tensor:
    return torch.tensor(document(length, 5)) % model.geometry.vocab_size


def source(
    model: Model, length: int, windows: Windows, lo: int, hi: int, at: int = 0, key: bytes | None = None
) -> Source:
    """Tokens [lo, hi) of the document at request position ``at``."""
    plan = window_plan(model.geometry, windows, hi)
    rebuild = Rebuild(plan, token_ids(model, length)) if windows.rebuilt else None
    run = KnownRun("d", 0, lo, hi - lo, length)
    return Source(run, sections(model, length, windows), key, rebuild)


def rebuilt(model: Model, found: Source, memory: Workspace | None = None, **options: int) -> tuple[Session, Counters]:
    """A request that is the run alone, what it reads in place."""
    memory, counters = memory or nan_memory(model.geometry), Counters()
    session = restored_session(memory, [found], found.run.stop, 0)
    rebuild_windows(model, memory, session, [found], counters, **options)
    return session, counters


def last_rows(model: Model, session: Session, count: int) -> Tensor:
    segment = session.segments[-1]
    rows = slice(segment.length - count, segment.length)
    return torch.stack([held.window[rows] for held in segment.layers])


def compare(model: Model, length: int, windows: Windows, lo: int, hi: int, chunk: int = 1024) -> Counters:
    """The last w rows of a run against the stored ones."""
    geometry = model.geometry
    count = min(geometry.window, hi - lo)
    everything = sections(model, length, ALL).sections
    stored = torch.stack([everything[f"layers.{n}.window"][hi - count : hi] for n in range(geometry.num_layers)])
    session, counters = rebuilt(model, source(model, length, windows, lo, hi), chunk=chunk)
    assert widest(last_rows(model, session, count), stored) <= 1e-4
    return counters


EDGES = sorted({n + d for n in (4, 32, 64, 128, 160, 192, 256) for d in (-1, 0, 1)} | {1, 2, 300})


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("length", EDGES)
def test_whole_documents(model: Model, length: int, name: str) -> None:
    """Around groups, windows, blocks, and the L * w = 160 rows that reach back as far as anything does."""
    counters = compare(model, length, EVERY[name], 0, length)
    plan = window_plan(model.geometry, EVERY[name], length)
    layers = model.geometry.num_layers
    # A row runs attention and experts in every layer but the last that it leaves latents in.
    assert counters.window_row_layers == counters.row_layers == sum(length - first for first in plan.first[1:])
    assert counters.window_rows == plan.rows <= layers * WINDOW
    assert counters.entries_refreshed == 0
    assert (counters.flops > 0) == (plan.rows > 0)


@given(strategies, st.integers(0, 9), st.integers(0, 9), st.sampled_from([32, 100, 1024]))
def test_parts_of_documents(model: Model, name: str, a: int, b: int, chunk: int) -> None:
    """From any block to any block or the end; rows in front of the part run too, and forwards may be cut anywhere."""
    lo, hi = min(a, b) * BLOCK, min(max(a, b) * BLOCK + BLOCK, 300)
    compare(model, 300, EVERY[name], lo, hi, chunk)


@pytest.mark.parametrize("shape", ["nano", "flash", "odd", "one", "sliding"])
@pytest.mark.parametrize("name", ["none", "checkpoints:1", "checkpoints:3"])
def test_other_geometries(shape: str, name: str) -> None:
    """Windows shorter and longer than a block, layers of one kind, one layer."""
    torch.manual_seed(3)
    model = tiny_model(shape)
    block, window = model.geometry.block_length, model.geometry.window
    length = max(7 * block, 3 * window) + 5
    for lo, hi in ((0, length), (0, block), (2 * block, 3 * block), (3 * block, 6 * block), (6 * block, length)):
        compare(model, length, EVERY[name], lo, hi)


def test_which_checkpoint_and_which_rows(model: Model) -> None:
    geometry, layers = model.geometry, model.geometry.num_layers
    assert (layers, WINDOW, BLOCK) == (5, 32, 32)
    for windows, stop, checkpoint, first in (
        (NONE, 300, 0, (140, 172, 204, 236, 268)),
        (NONE, 100, 0, (0, 0, 4, 36, 68)),
        (EVERY["checkpoints:2"], 300, 256, (256, 256, 256, 256, 268)),
        (EVERY["checkpoints:2"], 256, 256, (256,) * 5),
        (EVERY["checkpoints:2"], 63, 0, (0, 0, 0, 0, 31)),
        # Running the last 160 rows does not reach the last checkpoint: they run without one.
        (EVERY["checkpoints:16"], 512 + 160, 0, (512, 544, 576, 608, 640)),
        (EVERY["checkpoints:16"], 512 + 159, 512, (512, 543, 575, 607, 639)),
    ):
        plan = window_plan(geometry, windows, stop)
        assert (plan.checkpoint, plan.first) == (checkpoint, first), (windows, stop)
        assert checkpoint_before(geometry, windows, stop) == checkpoint


def test_a_shorter_tail_is_not_exact(model: Model) -> None:
    """One window less, and what is read is not there (memory that nobody wrote is NaN)."""
    found = source(model, 300, NONE, 0, 300)
    assert found.rebuild is not None
    plan = found.rebuild.plan
    short = tuple(min(first + WINDOW, 299) for first in plan.first[:-1]) + plan.first[-1:]
    object.__setattr__(plan, "first", short)
    session, _ = rebuilt(model, found)
    assert last_rows(model, session, WINDOW).isnan().any()


def test_states_are_kept_under_the_artifact_and_the_end(model: Model) -> None:
    """Found by the next request of the namespace, equal bit for bit; another end or namespace pays for itself."""
    space = nan_space(model.geometry)
    end = source(model, 300, NONE, 0, 300, key=b"one")

    def request(found: Source, namespace: str = "n") -> tuple[Tensor, int]:
        with Workspace(space, namespace) as memory:
            session, counters = rebuilt(model, found, memory)
            return last_rows(model, session, WINDOW), counters.window_row_layers

    first, ran = request(end)
    again, nothing = request(end)
    assert (ran > 0, nothing) == (True, 0)
    assert torch.equal(first, again)
    assert request(source(model, 300, NONE, 0, 256, key=b"one"))[1] > 0
    assert request(source(model, 300, NONE, 64, 256, key=b"one"))[1] == 0  # the same end of another part
    assert request(source(model, 300, NONE, 0, 300, key=b"two"))[1] > 0
    assert request(end, "other")[1] > 0
    assert space.store.recount() == []
    assert space.store.books()["arena"].live == 0


def test_ranks_recompute_together(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank that lacks the state makes all of them run: a forward needs everybody."""
    space = nan_space(model.geometry)
    for agreed in (True, False, True):
        with monkeypatch.context() as patch, Workspace(space) as memory:
            votes: list[bool] = []
            patch.setattr(model.group, "all_agree", lambda mine, a=agreed, v=votes: v.append(mine) or (mine and a))
            _, counters = rebuilt(model, source(model, 300, NONE, 0, 300, key=b"one"), memory)
            assert len(votes) == 1
            assert (counters.window_rows > 0) == (not (votes[0] and agreed))
    assert space.store.recount() == []


def test_shared_blocks_are_not_written_to(model: Model) -> None:
    """Recomputing copies no block of the document and leaves its entries as they were."""
    memory = nan_memory(model.geometry)
    found = source(model, 300, NONE, 64, 256, key=b"one")
    session, _ = rebuilt(model, found, memory)
    assert memory.held().copied == 0
    stored = sections(model, 300, NONE).sections
    for layer, held in enumerate(session.segments[0].layers):
        if held.entries is not None:
            ratio = model.geometry.ratio(layer)
            assert torch.equal(
                held.entries[: 192 // ratio], stored[f"layers.{layer}.entries"][64 // ratio : 256 // ratio]
            )


@pytest.mark.parametrize("name", EVERY)
def test_turbo_answers_equal(model: Model, name: str) -> None:
    """Logits behind several documents, whole and in part, one of them twice."""
    docs = [document(300, 5), document(96, 5)]

    def logits(windows: Windows) -> Tensor:
        artifacts = [sections(model, len(ids), windows) for ids in docs]
        pieces = [new(5), known(docs, 0, 64, 256), known(docs, 1), new(7, 1), known(docs, 0), new(20, 3)]
        ids, sources, session = restored(model, artifacts, pieces, windows)
        rows = choose_rows(model, session, [found.run for found in sources], ids, SHIPPED["turbo"], Counters())
        return prefill_reusing(model, session, sources, rows, ids, SHIPPED["turbo"], Counters())

    assert widest(logits(EVERY[name]), logits(ALL)) <= 1e-4
