"""The FLOPs of recompute in closed form: against what a prefill counts, and against a sum row by row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from redknot.comm.shard import Shard
from redknot.model.geometry import Geometry, geometry_from_config
from redknot.runtime.counters import Counters
from redknot.runtime.ledger import recompute_flops, recompute_row_layers
from redknot.runtime.model import Model
from redknot.runtime.prefill import dense_session, prefill
from tests.kit.memory import nan_memory
from tests.kit.oracle import Oracle
from tests.kit.tiny import SHAPES, C, H, geometry_of, tiny_model
from tests.model.test_geometry import FLASH, PRO


def flops_run(model: Model, length: int, chunk: int) -> int:
    counters = Counters()
    ids = torch.arange(length) % model.geometry.vocab_size
    prefill(model, [dense_session(nan_memory(model.geometry), length, length)], [ids], counters, chunk=chunk)
    return counters.flops


@pytest.mark.parametrize("shape", SHAPES)
def test_recompute_flops_is_what_a_prefill_counts(shape: str) -> None:
    """Lengths up to 300 and behind many blocks; the chunk never matters."""
    torch.manual_seed(1)
    model = tiny_model(shape)
    geometry = model.geometry
    lengths = {*range(1, 70), *range(70, 301, 7), 95, 96, 97, 127, 128, 129, 255, 256, 257, 300}
    for length in sorted(lengths):
        assert recompute_flops(geometry, length) == flops_run(model, length, 1024), length
    for length in (1, 31, 64, 129, 200, 259, 640):
        for chunk in (1, 130, 256):
            assert recompute_flops(geometry, length) == flops_run(model, length, chunk), (length, chunk)


def test_recompute_flops_of_whole_checkpoints(small: Oracle, wide: Oracle) -> None:
    for oracle in (small, wide):
        for length in (1, 4, 67, 68, 69, 128, 129, 300, 513):
            assert recompute_flops(oracle.geometry, length) == flops_run(oracle.model, length, 256), length


def row_by_row(geometry: Geometry, tokens: int) -> int:
    """The same sum, position by position."""
    g, total = geometry, 0
    for layer, kind in enumerate(g.kinds):
        ratio = g.ratio(layer)
        comp, index = (2 * g.head_dim, 2 * g.index_head_dim) if kind is C else (g.head_dim * (kind is H), 0)
        inputs = g.head_dim + g.q_lora_rank + 2 * comp + 2 * index + g.index_heads * (kind is C)
        streams = g.hc_mult * g.hidden_size
        for p in range(tokens):
            total += 2 * g.hidden_size * inputs + 2 * streams * (g.hc_mult * (g.hc_mult + 2) + 1)
            if layer == g.num_layers - 1 and p < tokens - 1:
                continue
            seen = (p + 1) // ratio if ratio else 0
            chosen = min(seen, g.index_topk) if kind is C else seen
            keys = min(p + 1, g.window) + chosen + (seen > 0)
            total += 4 * keys * g.num_heads * g.head_dim
            total += 2 * g.num_heads * g.head_dim * (g.q_lora_rank + g.o_lora_rank)
            total += 2 * g.o_groups * g.o_lora_rank * g.hidden_size
            if chosen < seen:
                total += 2 * g.index_heads * (g.q_lora_rank * g.index_head_dim + seen * (g.index_head_dim + 1))
            total += 2 * streams * (g.hc_mult * (g.hc_mult + 2) + 1 + 2 * (g.hc_mult + 1))
            total += 2 * g.hidden_size * g.num_experts
            total += 6 * g.hidden_size * g.expert_width * (g.experts_per_token + g.num_shared_experts)
    return total + 2 * g.hidden_size * (g.vocab_size + g.hc_mult * (g.hc_mult + 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_recompute_flops_row_by_row(shape: str) -> None:
    geometry = geometry_of(shape)
    for length in (*range(1, 301), 1023, 1024, 1025, 4096):
        assert recompute_flops(geometry, length) == row_by_row(geometry, length), length
    assert recompute_flops(geometry, 0) == recompute_row_layers(geometry, 0) == 0


@pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])
def test_recompute_flops_of_the_real_models(config: dict[str, Any]) -> None:
    """Exact beyond a top-k cut, and in closed form: at lengths that nothing which visits each row ends for."""
    geometry = geometry_from_config(config)
    first = replace(geometry, kinds=geometry.kinds[:4], hash_layers=geometry.hash_layers[:4])
    for length in (2047, 2052, 4100, 4224):
        assert recompute_flops(first, length) == row_by_row(first, length)
    # Behind all cuts and at whole groups it is a quadratic polynomial, of which four equidistant values show the third
    # difference.
    first_, second, third, fourth = (recompute_flops(geometry, steps << 40) for steps in range(1, 5))
    assert fourth - 3 * third + 3 * second - first_ == 0 < third - 2 * second + first_


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_share_what_is_sharded(world: int) -> None:
    """Only what every rank repeats is counted more than once in the sum over ranks."""
    geometry, length = geometry_from_config(FLASH), 5000
    alone = recompute_flops(geometry, length)
    ranks = [recompute_flops(geometry, length, Shard(rank, world)) for rank in range(world)]
    assert len(set(ranks)) == 1
    assert alone / world < ranks[0] < alone
    assert (sum(ranks) - alone) % (world - 1) == 0  # the replicated part, world - 1 times too often
