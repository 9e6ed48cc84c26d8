"""Real ranks compute what one process computes, with a share of the weights each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comm import rank_jobs
from tests.kit.oracle import Oracle
from tests.kit.ranks import run_ranks
from tests.kit.rows import widest


@pytest.fixture(scope="module")
def alone(wide: Oracle) -> dict[str, Any]:
    return rank_jobs.run(wide.model)


@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_equal_one_process(wide: Oracle, alone: dict[str, Any], world: int, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.txt").write_text(str(wide.path))
    ranks = run_ranks(world, "tests.comm.rank_jobs:logits", tmp_path)
    for found in ranks:
        for path in ("steps", "rows", "pruned"):
            assert widest(found[path], alone[path]) <= 1e-4, path
            # Every rank chose the same entries and experts: the sums are the same bits.
            assert torch.equal(found[path], ranks[0][path]), path
        assert found["sharded"] <= alone["sharded"] / world * 1.01
        assert found["prepared"] <= alone["prepared"] / world * 1.01  # the copies that products read
        assert found["native"] == alone["native"]
    assert sum(found["pairs"] for found in ranks) == alone["pairs"]
    assert all(found["flops"] < alone["flops"] for found in ranks)


def test_a_head_table_is_cut_by_the_groups_of_each_rank(wide: Oracle, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.txt").write_text(str(wide.path))
    alone, ranks = rank_jobs.run_split(wide.model), run_ranks(2, "tests.comm.rank_jobs:split", tmp_path)
    assert widest(torch.cat([found["local"] for found in ranks], dim=-1), alone["local"]) <= 1e-4
    for found in ranks:
        assert widest(found["whole"], found["split"]) <= 1e-4
        assert widest(found["split"], alone["split"]) <= 1e-4


def test_votes(tmp_path: Path) -> None:
    assert run_ranks(2, "tests.comm.rank_jobs:votes", tmp_path) == [[True, False, False, True]] * 2


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 ended with 1:(.|\n)*on purpose"):
        run_ranks(2, "tests.comm.rank_jobs:fails", tmp_path)


def test_ranks_that_hang_are_ended(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ranks \[0\] did not end in 4 s"):
        run_ranks(1, "tests.comm.rank_jobs:hangs", tmp_path, limit=4)
