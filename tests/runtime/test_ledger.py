"""Ledgers: recompute in closed form against what runs, and savings against rows counted layer by layer."""

from __future__ import annotations

import json
import timeit
from collections import Counter
from dataclasses import FrozenInstanceError, dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from redknot.build.capture import evaluate
from redknot.comm.shard import Shard
from redknot.model.geometry import Geometry, LayerKind, geometry_from_config
from redknot.model.profile import RECOMPUTE, SHIPPED, FanOutPolicy, Profile, Protected, Selector, Treatment
from redknot.model.weights import build_model
from redknot.plan.rows import KnownRun, Rows
from redknot.runtime import forward as forward_module
from redknot.runtime.counters import Counters
from redknot.runtime.ledger import (
    Saving,
    ledgers,
    recompute_flops,
    recompute_row_layers,
    row_bound,
    structural_ceiling,
)
from redknot.runtime.model import Model
from redknot.runtime.prefill import dense_session, prefill
from redknot.runtime.reuse import Source, choose_rows, prefill_reusing, restore, segmented_session
from tests.kit.oracle import Oracle, tokens
from tests.model.test_geometry import FLASH, PRO

S, C, H = LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA
TINY: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 50,
    "hidden_size": 12,
    "num_attention_heads": 4,
    "head_dim": 8,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 6,
    "o_groups": 2,
    "o_lora_rank": 5,
    "n_routed_experts": 4,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 7,
    "index_n_heads": 3,
    "index_head_dim": 6,
    "hc_mult": 2,
}
# layer kinds, CSA and HCA ratios, window, top-k, hash layers
SHAPES: dict[str, tuple[tuple[LayerKind, ...], int, int, int, int, int]] = {
    "nano": ((S, C, H, C), 4, 32, 32, 8, 1),
    "flash": ((S, H, C), 4, 128, 128, 16, 3),
    "odd": ((C, S, H), 3, 20, 17, 5, 0),
    "one": ((C,), 2, 8, 1, 1, 0),
    "sliding": ((S, S), 4, 128, 24, 512, 1),
}


class Random:
    """Weights of any shape that the names ask for, small enough to stay finite."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def tensor(self, name: str) -> Tensor:
        if name.endswith("tid2eid"):
            return torch.rand(self.geometry.vocab_size, 4).argsort(-1)[:, : self.geometry.experts_per_token]
        return 0.3 * torch.randn(self._shape(name))

    def experts(self, layer: int, part: slice) -> tuple[Tensor, Tensor]:
        count, width, hidden = part.stop - part.start, self.geometry.expert_width, self.geometry.hidden_size
        return torch.randn(count, 2 * width, hidden), torch.randn(count, hidden, width)

    def _shape(self, name: str) -> tuple[int, ...]:
        g = self.geometry
        streams = g.hc_mult * g.hidden_size
        parts = name.split(".")
        indexed = "indexer" in parts
        kind = g.kinds[int(parts[1])] if parts[0] == "layers" else S
        twice = 2 if kind is C else 1
        d = g.index_head_dim if indexed else g.head_dim
        if "compressor" in parts:
            ratio = g.csa_ratio if kind is C else g.hca_ratio
            shapes = {"wkv": (twice * d, g.hidden_size), "ape": (ratio, twice * d), "norm": (d,)}
            return shapes["wkv" if parts[-2] == "wgate" else parts[-1] if parts[-1] == "ape" else parts[-2]]
        by_ending: dict[str, tuple[int, ...]] = {
            "embed.weight": (g.vocab_size, g.hidden_size),
            "head.weight": (g.vocab_size, g.hidden_size),
            "hc_head_fn": (g.hc_mult, streams),
            "hc_head_base": (g.hc_mult,),
            "hc_head_scale": (1,),
            "_fn": ((2 + g.hc_mult) * g.hc_mult, streams),
            "_base": ((2 + g.hc_mult) * g.hc_mult,),
            "_scale": (3,),
            "wkv.weight": (g.head_dim, g.hidden_size),
            "wq_a.weight": (g.q_lora_rank, g.hidden_size),
            "weights_proj.weight": (g.index_heads, g.hidden_size),
            "indexer.wq_b.weight": (g.index_heads * g.index_head_dim, g.q_lora_rank),
            "wq_b.weight": (g.num_heads * g.head_dim, g.q_lora_rank),
            "wo_a.weight": (g.o_groups * g.o_lora_rank, g.heads_per_group * g.head_dim),
            "wo_b.weight": (g.hidden_size, g.o_groups * g.o_lora_rank),
            "attn_sink": (g.num_heads,),
            "q_norm.weight": (g.q_lora_rank,),
            "kv_norm.weight": (g.head_dim,),
            "norm.weight": (g.hidden_size,),
            "gate.weight": (g.num_experts, g.hidden_size),
            "gate.bias": (g.num_experts,),
            "w2.weight": (g.hidden_size, g.expert_width),
            "w1.weight": (g.expert_width, g.hidden_size),
            "w3.weight": (g.expert_width, g.hidden_size),
        }
        return next(shape for ending, shape in by_ending.items() if name.endswith(ending))


def geometry_of(shape: str) -> Geometry:
    kinds, csa, hca, window, topk, hashed = SHAPES[shape]
    layers = len(kinds)
    hash_types = ["hash_moe" if layer < hashed else "moe" for layer in range(layers)]
    more = {"num_hidden_layers": layers, "layer_types": list(kinds), "mlp_layer_types": hash_types}
    rates = {"compress_rates": {C: csa, H: hca}, "sliding_window": window, "index_topk": topk}
    return geometry_from_config(TINY | more | rates)


def flops_run(model: Model, length: int, chunk: int) -> int:
    counters = Counters()
    ids = torch.arange(length) % model.geometry.vocab_size
    prefill(model, [dense_session(model.geometry, length, length)], [ids], counters, chunk=chunk)
    return counters.flops


@pytest.mark.parametrize("shape", SHAPES)
def test_recompute_flops_is_what_a_prefill_counts(shape: str) -> None:
    """Lengths up to 300 and behind many blocks; the chunk never matters."""
    torch.manual_seed(1)
    geometry = geometry_of(shape)
    model = Model(geometry, build_model(Random(geometry), geometry))
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
    """Exact beyond a top-k cut, and in no time at 128K tokens."""
    geometry = geometry_from_config(config)
    first = replace(geometry, kinds=geometry.kinds[:4], hash_layers=geometry.hash_layers[:4])
    for length in (2047, 2052, 4100, 4224):
        assert recompute_flops(first, length) == row_by_row(first, length)
    assert min(timeit.repeat(lambda: recompute_flops(geometry, 131072), number=1, repeat=5)) < 2e-3


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_share_what_is_sharded(world: int) -> None:
    """Only what every rank repeats is counted more than once in the sum over ranks."""
    geometry, length = geometry_from_config(FLASH), 5000
    alone = recompute_flops(geometry, length)
    ranks = [recompute_flops(geometry, length, Shard(rank, world)) for rank in range(world)]
    assert len(set(ranks)) == 1
    assert alone / world < ranks[0] < alone
    assert (sum(ranks) - alone) % (world - 1) == 0  # the replicated part, world - 1 times too often


def profile(name: str, **change: Any) -> Profile:
    return SHIPPED[name].model_copy(update=change)


F3 = {"fence_layers": 3, "global_heads": (0,)}


@pytest.mark.parametrize("name", ["combined", "headsplit"])
def test_published_ceilings(name: str) -> None:
    """3F-37R-3F and 3F-55R-3F with one Global head in every eight."""
    flash, pro = geometry_from_config(FLASH), geometry_from_config(PRO)
    assert structural_ceiling(flash, profile(name, **F3)) == pytest.approx(37 / 43 * 7 / 8)
    assert f"{structural_ceiling(flash, profile(name, **F3)):.2%}" == "75.29%"
    assert structural_ceiling(pro, profile(name, **F3)) == pytest.approx(55 / 61 * 7 / 8)
    assert f"{structural_ceiling(pro, profile(name, **F3)):.2%}" == "78.89%"
    assert structural_ceiling(flash, RECOMPUTE) == 0.0
    assert structural_ceiling(flash, SHIPPED["turbo"]) == 7 / 8


def test_row_bound_of_the_published_system() -> None:
    """32K protected rows bound it, whatever is skipped; a profile that skips no row is not sped up by rows."""
    flash, combined = geometry_from_config(FLASH), profile("combined", **F3)
    found = []
    for total in (65536, 450560):
        found.append(row_bound(flash, combined, total, 32768, (total - 32768) // 10))
    assert found == pytest.approx([1.687, 4.094], abs=2e-3)
    assert row_bound(flash, profile("headsplit", **F3), 65536, 100) == 1.0
    assert row_bound(flash, RECOMPUTE, 65536, 65536) == 1.0
    assert row_bound(flash, SHIPPED["turbo"], 131072, 1310) == pytest.approx(100, rel=0.01)


class Sections:
    def __init__(self, sections: dict[str, Tensor]) -> None:
        self.sections = sections

    def section(self, name: str) -> Tensor:
        return self.sections[name]


PROFILES = {
    **{name: found for name, found in SHIPPED.items() if found.reuses},
    "turbo with fences that skip": profile("turbo", fence_layers=2),
    "two fence layers": profile("combined", fence_layers=2, global_heads=(1, 5)),
    "no fence": profile("combined", fence_layers=0),
    "one middle layer": profile("combined", fence_layers=3),
    "split without fence": profile("headsplit", fence_layers=0),
    "few experts": profile("rowsparse", fan_out=FanOutPolicy(k_min=2, tau=0.5)),
    "full active": Profile(
        name="mixed", middle_active=Treatment.FULL, selector=Selector.INDEXER, budget=0.25, protected=Protected()
    ),
}


@dataclass
class Seen:
    """What the layers did, by layer."""

    rows: Counter[int] = field(default_factory=Counter)
    split: Counter[int] = field(default_factory=Counter)
    head_rows: Counter[int] = field(default_factory=Counter)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen, projected, attention = Seen(), forward_module._projected, forward_module.attention

    def of_rows(scope: Any, p: Any, rows: Any, split: Any) -> Tensor:
        seen.rows[scope.layer] += rows.size
        seen.split[scope.layer] += 0 if split is None else len(split.rows)
        return projected(scope, p, rows, split)

    def of_heads(scope: Any, p: Any, rows: Any, heads: Any) -> Tensor:
        seen.head_rows[scope.layer] += rows.size * heads.heads
        return attention(scope, p, rows, heads)

    monkeypatch.setattr(forward_module, "_projected", of_rows)
    monkeypatch.setattr(forward_module, "attention", of_heads)
    return seen


DOCUMENTS, QUERY = (200, 150), 40
TOTAL = 1 + sum(DOCUMENTS) + QUERY


def reuse(model: Model, chosen: Profile, everything: bool, seen: Seen) -> tuple[Counters, Rows]:
    """One request of two documents; ``seen`` holds the prefill without the probe."""
    geometry, documents = model.geometry, [tokens(length) for length in DOCUMENTS]
    ids = torch.cat((tokens(1), *documents, tokens(QUERY)))
    runs = [KnownRun("0", 1, 0, 200, 200), KnownRun("1", 201, 0, 150, 150)]
    made = evaluate(model, documents, chosen.needs(), Counters())
    sources = [Source(run, Sections(made[int(run.artifact_id)])) for run in runs]
    session, counters = segmented_session(geometry, runs, TOTAL, 1), Counters()
    if chosen.reuses_rows:
        restore(session, sources, geometry)
    rows = choose_rows(model, session, runs, ids, chosen, counters)
    assert counters.row_layers == 0
    if everything:
        rows = Rows(TOTAL, torch.ones(TOTAL, dtype=torch.bool), torch.zeros(TOTAL, dtype=torch.bool))
    vars(seen).update(vars(Seen()))
    prefill_reusing(model, session, sources, rows, ids, chosen, counters, chunk=100)
    return counters, rows


@pytest.mark.parametrize("everything", [False, True], ids=["chosen rows", "every row"])
@pytest.mark.parametrize("name", PROFILES)
def test_savings_are_what_did_not_run(small: Oracle, name: str, everything: bool, seen: Seen) -> None:
    chosen, geometry = PROFILES[name], small.geometry
    counters, rows = reuse(small.model, chosen, everything, seen)
    found = ledgers(geometry, chosen, TOTAL, counters, {"forward_s": 0.5})
    layers, heads = geometry.num_layers, geometry.num_heads
    local = heads - len(chosen.global_heads) * geometry.o_groups
    native = [TOTAL] * (layers - 1) + [1]
    skipped = [native[layer] - seen.rows[layer] for layer in range(layers)]
    middle = range(chosen.fence_layers, layers - chosen.fence_layers)
    saved = sum(local * (skipped[layer] + seen.split[layer]) for layer in middle)
    assert found.head_rows == Saving(saved, layers * TOTAL * heads)
    assert found.head_rows.share <= structural_ceiling(geometry, chosen)
    assert found.token_rows == Saving(sum(skipped), layers * TOTAL)
    native_flops = recompute_flops(geometry, TOTAL)
    assert found.arithmetic == Saving(native_flops - counters.flops, native_flops)
    for layer in range(layers):  # and the heads that ran agree
        assert seen.head_rows[layer] == heads * seen.rows[layer] - local * seen.split[layer]
    bound = row_bound(geometry, chosen, TOTAL, int(rows.protected.sum()), int(rows.active.sum()))
    assert bound == pytest.approx(sum(native) / counters.row_layers)
    assert (counters.probe_row_layers > 0) == (chosen.selector is Selector.INDEXER)
    if everything and chosen.middle_idle is Treatment.SKIP:
        assert found.head_rows.saved == found.token_rows.saved == 0
    if not everything:
        assert found.head_rows.saved > 0
        assert found.arithmetic.share > 0
    assert json.loads(json.dumps(found.to_dict())) == {
        "head_rows": {"share": found.head_rows.share, "saved": saved, "whole": layers * TOTAL * heads},
        "token_rows": {"share": sum(skipped) / (layers * TOTAL), "saved": sum(skipped), "whole": layers * TOTAL},
        "arithmetic": found.arithmetic.to_dict(),
        "wall_clock": {"forward_s": 0.5},
    }


@pytest.mark.parametrize("name", SHIPPED)
def test_a_dense_run_saves_nothing(small: Oracle, name: str) -> None:
    """Whatever the profile: the pruned last layer is not a saving."""
    counters = Counters()
    prefill(small.model, [dense_session(small.geometry, 90, 90)], [tokens(90)], counters)
    found = ledgers(small.geometry, SHIPPED[name], 90, counters, {})
    assert [found.head_rows.saved, found.token_rows.saved, found.arithmetic.saved] == [0, 0, 0]
    assert found.head_rows.share == found.token_rows.share == found.arithmetic.share == 0.0


def test_merges_are_counted_once_per_part(small: Oracle) -> None:
    """The same rows in two segments: one merge more for every row that also reads the first segment's entries."""
    geometry, heads_d = small.geometry, small.geometry.num_heads * small.geometry.head_dim
    whole, cut = Counters(), Counters()
    kinds = Counter(geometry.kinds[:-1])
    prefill(small.model, [dense_session(geometry, 64, 64)], [tokens(64)], whole)
    prefill(small.model, [segmented_session(geometry, [KnownRun("0", 0, 0, 32, 32)], 64, 0)], [tokens(64)], cut)
    # Behind the seam, 31 rows reach back over it; rows with entries of their own merge a second part.
    windows = sum(kinds.values()) * 31
    entries = kinds[C] * (32 - 3) + kinds[H]
    assert cut.flops - whole.flops == 4 * heads_d * (windows + entries + 1)


def test_ledgers_are_frozen() -> None:
    found = Saving(1, 4)
    assert found.share == 0.25
    assert Saving(0, 0).share == 0.0
    with pytest.raises(FrozenInstanceError):
        found.saved = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        found + found  # type: ignore[operator]
