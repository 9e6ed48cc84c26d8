"""The exact prefix cache: requests that share beginnings answer as dense ones do, whatever was kept or had to go."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redknot.config import LATENT_BYTES
from redknot.errors import ReuseUnavailableError, StoreError
from redknot.latents.sizing import slot_bytes
from redknot.latents.space import LatentSpace
from redknot.model.profile import load_profile
from redknot.runtime.engine import Engine, Result
from redknot.runtime.ledger import recompute_flops, recompute_row_layers
from redknot.runtime.loaded import Loaded
from tests.kit.requests import BLOCK, BOS, ROOT, document
from tests.runtime.conftest import Served
from tests.runtime.test_metrics import samples

PREFIX = load_profile(str(ROOT / "configs/profiles/prefix.json"))
TOLERANCE = 1e-5  # relative to the largest logit


@dataclass(frozen=True)
class World:
    """One model: an engine without a cache, and as many with one as a test wants."""

    loaded: Loaded
    dense: Engine

    def cached(self) -> Engine:
        return Engine(self.loaded, profile=PREFIX)

    def expected(self, ids: list[int], length: int = 4) -> Result:
        return ask(self.dense, ids, length)


@pytest.fixture(scope="module")
def world(served: Served) -> World:
    dense = Engine(served.checkpoint, profile="recompute")
    return World(dense.loaded, dense)


def ask(engine: Engine, ids: list[int], length: int = 4, reuse: str = "auto") -> Result:
    return engine.generate(token_ids=ids, max_new_tokens=length, reuse=reuse, stop_at_eos=False)


def same(found: Result, expected: Result) -> None:
    error = (found.logits - expected.logits).abs().max() / expected.logits.abs().max()
    assert error < TOLERANCE
    assert found.token_ids == expected.token_ids


def cached(engine: Engine, ids: list[int], length: int = 1) -> int:
    """Tokens that the cache had; the rest ran, and the report adds up."""
    result = ask(engine, ids, length)
    report = result.report
    assert report.forwarded_rows == len(ids) - report.cached_tokens
    assert (report.arm, report.reused_tokens, report.bounds) == ("dense", 0, None)
    return report.cached_tokens


def used(engine: Engine) -> int:
    return engine.latents.store.books()["device"].live // engine.latents.store.config.block_bytes


def block_bytes(served: Served) -> int:
    with LatentSpace(served.model.geometry) as space:
        return slot_bytes(space.layout)


# What is reused


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 7, 1100])
def test_the_same_request_again_runs_the_rows_behind_its_whole_pages(world: World, length: int) -> None:
    """Never none: the last row gives the first token. 1,100 tokens are more than one chunk."""
    ids = document(length, 1)
    with world.cached() as engine:
        assert cached(engine, ids) == 0
        again = ask(engine, ids)
        assert again.report.cached_tokens == (length - 1) // BLOCK * BLOCK
        same(again, world.expected(ids))
        assert engine.check_books() == []


def test_only_equal_tokens_from_position_0_on_are_reused(world: World) -> None:
    a, b = document(4 * BLOCK, 1), document(4 * BLOCK, 2)
    with world.cached() as engine:
        assert cached(engine, a) == 0
        assert cached(engine, [BOS, *a]) == 0  # moved by one
        assert cached(engine, a[BLOCK:]) == 0
        assert cached(engine, b[:BLOCK] + a[BLOCK:]) == 0
        changed = [*a]
        changed[2 * BLOCK + 5] += 1
        assert cached(engine, changed) == 2 * BLOCK
        assert cached(engine, changed + b) == 4 * BLOCK
        assert cached(engine, a + b) == 4 * BLOCK  # the other branch is still there
        assert cached(engine, a[: 2 * BLOCK + 3]) == 2 * BLOCK


def test_a_request_goes_on_where_several_others_ended(world: World) -> None:
    """Pages that three requests left, one behind the other, under one that decodes over a page's end."""
    ids = document(9 * BLOCK + 30, 3)
    with world.cached() as engine:
        for stop in (2 * BLOCK + 1, 5 * BLOCK, 8 * BLOCK + 9):
            ask(engine, ids[:stop])
        found = ask(engine, ids, 40)
        assert found.report.cached_tokens == 8 * BLOCK
        same(found, world.expected(ids, 40))


def test_what_a_request_generates_is_not_kept(world: World) -> None:
    ids = document(BLOCK, 4)
    with world.cached() as engine:
        answer = list(ask(engine, ids, 40).token_ids)
        assert cached(engine, ids + answer) == BLOCK


def test_off_neither_takes_nor_leaves_anything(world: World) -> None:
    ids = document(4 * BLOCK, 1)
    with world.cached() as engine:
        off = ask(engine, ids, reuse="off")
        assert cached(engine, ids) == 0
        again = ask(engine, ids, reuse="off")
        assert (again.report.cached_tokens, again.report.forwarded_rows) == (0, len(ids))
        assert torch.equal(off.logits, again.logits)
        with pytest.raises(ReuseUnavailableError, match="profile prefix reuses nothing"):
            ask(engine, ids, reuse="required")


def test_the_ledgers_count_no_cached_row_as_a_saving(world: World) -> None:
    ids, geometry = document(300, 1), world.dense.model.geometry
    with world.cached() as engine:
        ask(engine, ids)
        report = ask(engine, ids).report
    assert report.cached_tokens == 288
    assert report.counters.row_layers == recompute_row_layers(geometry, 12)
    assert report.counters.flops == recompute_flops(geometry, 300, cached=288)
    ledgers = report.ledgers
    assert (ledgers.head_rows.saved, ledgers.token_rows.saved, ledgers.arithmetic.saved) == (0, 0, 0)
    assert report.latents.found == 9


def test_engines_share_no_prefix(world: World) -> None:
    ids = document(3 * BLOCK, 1)
    with world.cached() as one, Engine(world.loaded, profile=PREFIX, namespace="b") as other:
        ask(one, ids)
        assert cached(other, ids) == 0
        assert cached(one, ids) == 2 * BLOCK


def test_pages_are_counted(world: World) -> None:
    ids = document(4 * BLOCK + 1, 1)
    with world.cached() as engine:
        ask(engine, ids)
        ask(engine, ids)
        found = samples(engine.metrics)
    assert [found[f"redknot_prefix_pages_{name}_total"] for name in ("found", "kept", "evicted")] == [4, 4, 0]


def test_without_the_option_nothing_is_kept(world: World) -> None:
    ids = document(4 * BLOCK, 1)
    assert [cached(world.dense, ids), cached(world.dense, ids)] == [0, 0]
    assert used(world.dense) == 0


# Room


def tight(world: World, served: Served, monkeypatch: pytest.MonkeyPatch, blocks: int) -> Engine:
    monkeypatch.setenv(LATENT_BYTES, str(blocks * block_bytes(served)))
    return world.cached()


def test_what_was_used_longest_ago_goes_first(world: World, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page takes its block and those of its state. The end of a prefix goes before its beginning."""
    a, b, c = (document(3 * BLOCK + 1, seed) for seed in (1, 2, 3))
    with world.cached() as engine:
        ask(engine, a, 1)
        page = used(engine) // 3
    with tight(world, served, monkeypatch, 6 * page + 4) as engine:
        assert [cached(engine, ids) for ids in (a, b, a)] == [0, 0, 3 * BLOCK]
        assert cached(engine, c) == 0  # in the place of b
        assert cached(engine, a) == 3 * BLOCK
        assert cached(engine, c) == 3 * BLOCK
        assert cached(engine, [*b[:BLOCK], 5]) < BLOCK
        assert engine.metrics.registry.get_sample_value("redknot_prefix_pages_evicted_total") is not None
        assert engine.check_books() == []


def test_no_request_is_refused_that_an_empty_cache_would_answer(
    world: World, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that one request fills: its own prefix is given up too, since the state of pages takes room."""
    ids = document(8 * BLOCK - 4, 1)
    with tight(world, served, monkeypatch, 8) as engine:
        for _ in range(3):
            same(ask(engine, ids, 4), world.expected(ids, 4))
            assert engine.check_books() == []
        for seed in range(4):
            other = document(5 * BLOCK, seed)
            same(ask(engine, other, 4), world.expected(other, 4))
        with pytest.raises(StoreError, match="raise REDKNOT_LATENT_BYTES"):
            ask(engine, ids, 5)
        same(ask(engine, ids, 4), world.expected(ids, 4))
        assert engine.check_books() == []


def test_all_memory_is_given_back(world: World) -> None:
    engine = world.cached()
    ask(engine, document(5 * BLOCK, 1))
    store = engine.latents.store
    assert used(engine) > 5
    engine.close()
    assert store.books()["device"].live == store.books()["arena"].live == 0


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # the text it begins with
        st.integers(0, 7 * BLOCK),  # how much of it
        st.integers(0, 1),  # what follows
        st.integers(1, 2 * BLOCK),  # how much of that
        st.integers(1, 6),  # tokens to generate
    ),
    min_size=2,
    max_size=6,
)


@pytest.mark.parametrize("blocks", [None, 12, 40])
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=REQUESTS)
def test_any_requests_answer_as_without_a_cache(
    world: World, served: Served, monkeypatch: pytest.MonkeyPatch, blocks: int | None, requests: list[tuple[int, ...]]
) -> None:
    """With room for everything, for little, and for next to nothing; a request takes at most ten blocks."""
    texts, tails = (
        [document(7 * BLOCK, seed) for seed in range(3)],
        [document(2 * BLOCK, 9 + seed) for seed in range(2)],
    )
    if blocks is not None:
        monkeypatch.setenv(LATENT_BYTES, str(blocks * block_bytes(served)))
    earlier: list[list[int]] = []
    with world.cached() as engine:
        for text, head, tail, length, new in requests:
            ids = texts[text][:head] + tails[tail][:length]
            found = ask(engine, ids, new)
            same(found, world.expected(ids, new))
            longest = max((shared(ids, other) for other in earlier), default=0)
            most = min(longest // BLOCK, (len(ids) - 1) // BLOCK) * BLOCK
            assert found.report.cached_tokens <= most
            if blocks is None:
                assert found.report.cached_tokens == most
            assert found.report.forwarded_rows == len(ids) - found.report.cached_tokens
            assert engine.check_books() == []
            earlier.append(ids)


def shared(one: list[int], other: list[int]) -> int:
    """How many tokens two requests begin with alike."""
    alike = [a == b for a, b in zip(one, other, strict=False)]
    return [*alike, False].index(False)
