"""Memory of requests: how much, what it shares, what it copies, and that all of it comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from redknot.config import LatentSettings
from redknot.errors import ConfigError, StoreError
from redknot.latents.handles import ArenaFullError, ForeignHandleError, PoolFullError, StaleHandleError
from redknot.latents.paged import PagedRows, place
from redknot.latents.segment import Segment
from redknot.latents.sizing import sized_for, slot_bytes
from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace
from redknot.model.geometry import Geometry, LayerKind
from tests.kit.memory import nan_memory, nan_space
from tests.kit.tiny import SHAPES, geometry_of

KEYS = [b"0", b"1", b"2"]


def geometry(shape: str = "nano") -> Geometry:
    return replace(geometry_of(shape), max_positions=512)


def entries_of(segment: Segment, layer: int = 1) -> PagedRows:
    """Layer 1 of "nano" is CSA, with 8 entries a block of 32 tokens."""
    found = segment.layers[layer].entries
    assert found is not None
    return found


def blocks_of(memory: Workspace) -> tuple[int, int, int, int]:
    """Found, filled, copied, fresh."""
    held = memory.held()
    found = (held.found, held.filled, held.copied, held.fresh)
    assert held.shared_bytes + held.own_bytes == held.arena_bytes + held.block_bytes * sum(found)
    return found


def known(memory: Workspace, blocks: int = 3) -> tuple[Segment, list[int]]:
    segment = Segment(0, 0, 32 * blocks, closed=True)
    return segment, memory.find(segment, KEYS[:blocks])


def publish(memory: Workspace, value: float = 1.0) -> Segment:
    """A known segment, filled and to be found by others."""
    segment, missing = known(memory)
    assert segment.blocks is not None
    for number in missing:
        entries_of(segment)[8 * number : 8 * number + 8] = torch.full((8, 8), value + number)
        segment.blocks.publish(number, KEYS[number])
    return segment


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("capacity", [0, 1, 33, 256])
def test_memory_of_a_segment(shape: str, capacity: int) -> None:
    g = geometry(shape)
    space = nan_space(g)
    with Workspace(space) as memory:
        segment = Segment(0, 0, 0, closed=False)
        memory.allocate(segment, capacity)
        blocks = -(-capacity // g.block_length)
        assert blocks_of(memory) == (0, 0, 0, blocks)
        assert len(segment.layers) == g.num_layers
        for layer, latents in enumerate(segment.layers):
            assert latents.window.shape == (capacity, g.head_dim)
            assert latents.window.isnan().all()
            assert (latents.entries is not None) == bool(g.ratio(layer))
            assert (latents.index_keys is not None) == (g.kinds[layer] is LayerKind.CSA)
            for paged, width in ((latents.entries, g.head_dim), (latents.index_keys, g.index_head_dim)):
                if paged is not None:
                    assert (len(paged), paged.width) == (blocks * g.block_length // g.ratio(layer), width)
                    assert paged[:].isnan().all()
        assert space.store.recount() == []
    assert space.store.books()["device"].live == space.store.books()["arena"].live == 0
    with pytest.raises(StaleHandleError):
        memory.close()


@pytest.mark.parametrize("shape", list(SHAPES))
def test_no_two_rows_share_memory(shape: str) -> None:
    """Every row of two segments holds a number of its own, whatever is written in which order."""
    g, written = geometry(shape), {}
    with Workspace(nan_space(g)) as memory:
        for number in range(2):
            segment = Segment(0, 0, 0, closed=False)
            memory.allocate(segment, 200)
            for layer, latents in enumerate(segment.layers):
                for kind in ("window", "entries", "index_keys"):
                    held = getattr(latents, kind)
                    if held is not None:
                        value = float(len(written) + 1)
                        held[torch.arange(len(held)).flip(0)] = torch.full((len(held), held[:1].shape[1]), value)
                        written[number, layer, kind] = (held, value)
        for held, value in written.values():
            assert bool((held[:] == value).all())


def test_rows_of_several_segments() -> None:
    with Workspace(nan_space(geometry())) as memory:
        fields, expected = [], []
        for count, length in ((3, 32), (8, 32), (17, 96), (1, 1)):
            segment = Segment(0, 0, 0, closed=True)
            memory.allocate(segment, length)
            fields.append(entries_of(segment))
            rows = torch.randn(count, 8)
            fields[-1][:count] = rows
            expected.append(rows)
        found = place(fields, [torch.arange(len(rows)) for rows in expected])
        assert torch.equal(found.read(fields), torch.cat(expected))
        found.write(fields, 2 * torch.cat(expected))
        assert all(torch.equal(field[: len(rows)], 2 * rows) for field, rows in zip(fields, expected, strict=True))
    segment = Segment(0, 0, 0, closed=True)
    nan_memory(geometry()).allocate(segment, 1)
    with pytest.raises(ForeignHandleError, match="two latent stores"):
        place([fields[0], entries_of(segment)], [torch.arange(1)] * 2)


def test_known_blocks_are_found_shared_and_copied_before_a_write() -> None:
    space = nan_space(geometry(), arenas=2)
    with Workspace(space, "a") as one, Workspace(space, "a") as two:
        first = publish(one)
        assert blocks_of(one) == (0, 3, 0, 0)
        second, missing = known(two)
        assert missing == []
        assert blocks_of(two) == (3, 0, 0, 0)
        assert space.store.books()["device"].live == 3 * space.store.config.block_bytes
        before = entries_of(first)[:]
        entries_of(second)[torch.tensor([9])] = torch.full((1, 8), -1.0)
        assert blocks_of(two) == (2, 0, 1, 0)
        assert torch.equal(entries_of(first)[:], before)  # the shared bytes are what they were
        before[9] = -1.0
        assert torch.equal(entries_of(second)[:], before)
        assert space.store.books()["device"].live == 4 * space.store.config.block_bytes
        # And so it is for the one that put them there.
        entries_of(first)[:1] = torch.full((1, 8), -2.0)
        assert float(entries_of(second)[0:1][0, 0]) == 1.0
        assert blocks_of(one) == (0, 2, 1, 0)
        assert space.store.recount() == []
    with Workspace(space, "a") as three, Workspace(space, "b") as four:
        segment, missing = known(three)
        assert missing == []  # they outlived the requests that made them
        assert [float(value) for value in entries_of(segment)[::8][:, 0]] == [1.0, 2.0, 3.0]
        assert known(four)[1] == [0, 1, 2]  # another namespace has nothing


def test_equal_blocks_made_at_once_are_shared_and_others_are_not() -> None:
    space = nan_space(geometry(), arenas=3)
    with Workspace(space) as one, Workspace(space) as two, Workspace(space) as three:
        segments = [known(memory)[0] for memory in (one, two, three)]
        for segment, value in zip(segments, (1.0, 1.0, 2.0), strict=True):
            assert segment.blocks is not None
            entries_of(segment)[:8] = torch.full((8, 8), value)
            segment.blocks.publish(0, KEYS[0])
        assert blocks_of(one) == (0, 1, 0, 2)
        assert blocks_of(two) == (1, 0, 0, 2)
        assert blocks_of(three) == (0, 0, 0, 3)  # it shares nothing, and writes to all of it without a copy
        assert [segment.blocks.shared([0]) for segment in segments if segment.blocks is not None] == [1, 1, 0]
        assert space.store.counters()["shares"] == space.store.counters()["dedup_collisions"] == 1
        assert [float(entries_of(segment)[:1][0, 0]) for segment in segments] == [1.0, 1.0, 2.0]
        assert space.store.recount() == []


def test_a_request_that_does_not_fit_takes_nothing() -> None:
    g = geometry()
    nbytes = slot_bytes(LatentSpace(g).layout)
    space = nan_space(g, device_bytes=4 * nbytes, arena_bytes=64 << 10, arenas=2)
    with Workspace(space) as memory:
        memory.allocate(Segment(0, 0, 0, closed=True), 33)
        message = (
            f"needs {4 * nbytes} bytes of latents .4 blocks.*the store has {2 * nbytes}; raise REDKNOT_LATENT_BYTES"
        )
        with pytest.raises(PoolFullError, match=message):
            memory.allocate(Segment(0, 0, 0, closed=True), 97)
        with pytest.raises(ArenaFullError, match=r"too long.*raise REDKNOT_LATENT_ARENA_BYTES"):
            memory.allocate(Segment(0, 0, 0, closed=True), 600)
        with Workspace(space) as other:
            with pytest.raises(PoolFullError, match="all 2 arenas"):
                Workspace(space)
            with pytest.raises(PoolFullError):
                known(other)
            assert blocks_of(other) == (0, 0, 0, 0)
        assert space.store.recount() == []
    assert space.store.books()["device"].live == 0
    with pytest.raises(StoreError, match="cannot take"):
        LatentSpace(g, LatentSettings(device_bytes=1 << 60))


def test_a_copy_needs_room_too() -> None:
    g = geometry()
    space = nan_space(g, device_bytes=3 * slot_bytes(LatentSpace(g).layout))
    with Workspace(space) as memory:
        segment = publish(memory)
        with pytest.raises(PoolFullError):
            entries_of(segment)[:1] = torch.zeros(1, 8)
        assert float(entries_of(segment)[:1][0, 0]) == 1.0
        with pytest.raises(PoolFullError, match=r"needs .* raise REDKNOT_LATENT_BYTES"):
            space.require(1)
        space.require(0)
    space.require(3)  # what is cached may leave
    assert space.store.recount() == []


def test_memory_is_not_used_after_it_was_given_back() -> None:
    space = nan_space(geometry())
    with Workspace(space) as memory:
        segment = Segment(0, 0, 0, closed=False)
        memory.allocate(segment, 32)
        session = memory.session([segment])
        session.check()
    with pytest.raises(StaleHandleError, match="its request has ended"):
        session.check()
    with pytest.raises(IndexError):
        entries_of(segment)[:1]
    with Workspace(space) as memory:
        memory.allocate(segment, 32)
        session = memory.session([segment])
        assert segment.blocks is not None
        run = segment.blocks.run
        space.store.free(run)
        with pytest.raises(StaleHandleError):
            session.check()
        segment.blocks.run = space.store.allocate("", 0)


def test_exactly_enough_for_a_batch() -> None:
    for shape in SHAPES:
        g = geometry(shape)
        for lengths in ([1], [1, 33, 127, 128, 200], [300]):
            with LatentSpace(g, sized_for(g, lengths)) as space, Workspace(space) as memory:
                for length in lengths:
                    segment = Segment(0, 0, length, closed=True)
                    memory.allocate(segment, length)
                    memory.session([segment])
                assert space.store.room() == 0 or not any(g.ratio(layer) for layer in range(g.num_layers))


def test_blocks_cost_what_their_tokens_take_behind_those_before_them() -> None:
    """Of two documents the longer one's end is dearer; without a unit all blocks are worth the same."""
    g = geometry()
    with LatentSpace(g, cost=lambda tokens: tokens**2) as space, Workspace(space) as memory:
        segment, missing = known(memory, 3)
        assert segment.blocks is not None
        for number in missing:
            segment.blocks.publish(number, KEYS[number], 7.0 if number == 1 else None)
        found = [space.store._table.of(handle).cost for handle in segment.blocks.handles]
        assert found == [32**2, 7.0, 96**2 - 64**2]
    assert nan_space(g).block_cost(5) == 1.0


def test_a_pool_without_room_for_a_block_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"REDKNOT_LATENT_BYTES is 10; one block of this model takes \d+ bytes"):
        LatentSpace(geometry_of(next(iter(SHAPES))), LatentSettings(device_bytes=10))


def test_an_arena_without_room_for_a_request_of_one_block_names_the_variable() -> None:
    """And one with exactly as much serves it."""
    for shape in SHAPES:
        g = geometry_of(shape)
        least = sized_for(g, [1]).arena_bytes
        assert least is not None
        match = rf"REDKNOT_LATENT_ARENA_BYTES is {least - 1}; .* one block of this model takes {least} bytes"
        with pytest.raises(ConfigError, match=match):
            LatentSpace(g, LatentSettings(arena_bytes=least - 1))
        with LatentSpace(g, LatentSettings(arena_bytes=least)) as space, Workspace(space) as memory:
            segment = Segment(0, 0, 0, closed=False)
            memory.allocate(segment, g.block_length)
            memory.session([segment]).check()
