"""Shard arithmetic, groups that cannot divide, and one process as a group of one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redknot.comm.group import OneProcess
from redknot.comm.shard import SINGLE, Shard
from redknot.errors import ConfigError
from redknot.model.checkpoint import load_model
from redknot.model.weights import build_model, named_tensors
from tests.kit.oracle import Oracle
from tests.kit.ranks import SHARDED


@given(st.integers(1, 64), st.integers(0, 1000))
def test_parts_tile_the_whole_evenly(world: int, total: int) -> None:
    parts = [Shard(rank, world).part(total) for rank in range(world)]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(total))
    sizes = {part.stop - part.start for part in parts}
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 64))
def test_check_names_what_does_not_divide(world: int, groups: int, experts: int) -> None:
    totals = {"output groups": groups, "routed experts": experts}
    wrong = [f"{total} {name}" for name, total in totals.items() if total % world]
    if not wrong:
        Shard(world - 1, world).check(totals)
        return
    with pytest.raises(ConfigError) as refusal:
        Shard(0, world).check(totals)
    assert str(refusal.value) == f"{world} tensor parallel ranks do not divide {wrong[0]}"


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (1, 1)])
def test_a_rank_outside_the_world(rank: int, world: int) -> None:
    with pytest.raises(ConfigError, match=rf"rank {rank} is not below the world size {world}"):
        Shard(rank, world).check({})


def test_shards_are_values() -> None:
    assert Shard(1, 2) == Shard(1, 2)
    assert Shard() == SINGLE == OneProcess.shard
    with pytest.raises(dataclasses.FrozenInstanceError):
        SINGLE.rank = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("world", "what"),
    [(16, "8 output groups"), (3, "8 output groups"), (5, "8 output groups"), (32, "8 output groups")],
)
def test_a_group_that_cannot_divide_the_model(wide: Oracle, world: int, what: str) -> None:
    with pytest.raises(ConfigError, match=f"^{world} tensor parallel ranks do not divide {what}$"):
        load_model(wide.path, shard=Shard(0, world))


def test_experts_and_widths_must_divide_too(wide: Oracle) -> None:
    class Nothing:
        def tensor(self, name: str) -> torch.Tensor:
            raise AssertionError("refused before anything is read")

        experts = tensor

    for changes, what in (({"num_experts": 12}, "12 routed experts"), ({"expert_width": 20}, "20 shared expert width")):
        geometry = dataclasses.replace(wide.geometry, **changes)
        with pytest.raises(ConfigError, match=f"^8 tensor parallel ranks do not divide {what}$"):
            build_model(Nothing(), geometry, Shard(0, 8))  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_bytes_of_a_rank(wide: Oracle, world: int) -> None:
    """Each rank holds total / N of what is sharded, in memory of its own, and all of what is replicated."""
    whole = dict(named_tensors(wide.model.weights))
    total = sum(tensor.nbytes for name, tensor in whole.items() if name.endswith(SHARDED))
    replicated = {name for name in whole if not name.endswith(SHARDED)}
    assert "layers.2.attn.indexer.wq_b" in replicated
    for rank in range(world):
        mine = dict(named_tensors(load_model(wide.path, shard=Shard(rank, world))[1]))
        assert mine.keys() == whole.keys()
        held = {name: tensor.untyped_storage().nbytes() for name, tensor in mine.items()}
        assert sum(held[name] for name in held if name not in replicated) <= total / world * 1.01
        assert all(torch.equal(mine[name], whole[name]) for name in replicated)


def test_one_process() -> None:
    group, tensor = OneProcess(), torch.ones(2)
    assert group.all_reduce(tensor) is tensor
    assert group.all_agree(True)
    assert not group.all_agree(False)
