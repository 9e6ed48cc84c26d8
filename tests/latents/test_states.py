"""States of several blocks: found whole or not at all, kept where there is room."""

from __future__ import annotations

import torch
from torch import Tensor

from redknot.latents.segment import Segment
from redknot.latents.sizing import slot_bytes
from redknot.latents.space import LatentSpace
from redknot.latents.states import State
from redknot.latents.workspace import Workspace
from redknot.nano.parameters import GEOMETRY
from tests.kit.memory import nan_space

BLOCKS = 6
FLOPS = 3000.0


def space_of(blocks: int = BLOCKS) -> LatentSpace:
    return nan_space(GEOMETRY, device_bytes=blocks * slot_bytes(LatentSpace(GEOMETRY).layout))


def data_of(space: LatentSpace, blocks: float = 2.5) -> Tensor:
    count = int(blocks * space.store.config.block_bytes)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


def found(space: LatentSpace, key: bytes, nbytes: int, namespace: str = "n") -> Tensor | None:
    with Workspace(space, namespace) as memory:
        return State(memory, key, nbytes).read()


def keep(space: LatentSpace, key: bytes, data: Tensor) -> None:
    with Workspace(space, "n") as memory:
        State(memory, key, len(data)).write(data, FLOPS)


def occupy(space: LatentSpace, blocks: int) -> Workspace:
    """Somebody else's request that holds so many blocks."""
    memory = Workspace(space)
    memory.allocate(Segment(0, 0, 1, closed=True), blocks * GEOMETRY.block_length)
    return memory


def test_what_was_kept_is_found_by_its_key_and_namespace() -> None:
    space = space_of()
    data = data_of(space)
    assert found(space, b"a", len(data)) is None
    keep(space, b"a", data)
    again = found(space, b"a", len(data))
    assert again is not None
    assert torch.equal(again, data)
    assert found(space, b"b", len(data)) is None
    assert found(space, b"a", len(data), "other") is None
    keep(space, b"a", data)  # nothing new: it is there
    assert space.store.books()["device"].live == 3 * space.store.config.block_bytes
    assert space.store.recount() == []


def test_a_part_is_not_a_state_and_is_completed() -> None:
    """Of three blocks one was evicted: nothing is found, and writing puts the one in its place."""
    space = space_of()
    data = data_of(space)
    keep(space, b"a", data)
    occupy(space, BLOCKS - 2).close()
    assert found(space, b"a", len(data)) is None
    keep(space, b"a", data)
    again = found(space, b"a", len(data))
    assert again is not None
    assert torch.equal(again, data)
    assert space.store.recount() == []


def test_no_room() -> None:
    space = space_of()
    data = data_of(space)
    with occupy(space, BLOCKS - 2):
        keep(space, b"a", data)
        assert found(space, b"a", len(data)) is None
    keep(space, b"a", data)
    assert found(space, b"a", len(data)) is not None
    assert space.store.recount() == []


def test_its_blocks_share_what_it_takes_to_compute_it_again() -> None:
    """Where the store has a unit at all; else all blocks are worth the same."""
    for cost, each in ((lambda tokens: float(tokens), FLOPS / 3), (None, 1.0)):
        with LatentSpace(GEOMETRY, cost=cost) as space:
            keep(space, b"a", data_of(space))
            assert [block.cost for block in space.store._table.index.values()] == [each] * 3
