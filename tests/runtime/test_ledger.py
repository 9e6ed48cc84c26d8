"""Ledgers: what a request saved, against rows and heads counted layer by layer while it ran."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from redknot.build.capture import evaluate
from redknot.model.geometry import geometry_from_config
from redknot.model.heads import HeadTable
from redknot.model.profile import RECOMPUTE, SHIPPED, FanOutPolicy, Profile, Protected, Selector, Treatment
from redknot.plan.rows import KnownRun, Rows
from redknot.plan.worth import probe_row_layers
from redknot.runtime import forward as forward_module
from redknot.runtime.counters import Counters
from redknot.runtime.ledger import Bounds, Saving, bounds, ledgers, recompute_flops, row_bound, structural_ceiling
from redknot.runtime.model import Model
from redknot.runtime.prefill import dense_session, prefill
from redknot.runtime.restore import Source, restored_session, segmented_session
from redknot.runtime.reuse import choose_rows, prefill_reusing
from tests.kit.memory import nan_memory
from tests.kit.oracle import Oracle, tokens
from tests.model.test_geometry import FLASH, PRO


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
    assert found == pytest.approx([1.687, 4.083], abs=2e-3)
    assert row_bound(flash, profile("headsplit", **F3), 65536, 100) == 1.0
    assert row_bound(flash, RECOMPUTE, 65536, 65536) == 1.0
    assert row_bound(flash, SHIPPED["turbo"], 131072, 1310) == pytest.approx(100, rel=0.01)


def test_bounds_read_as_one_line() -> None:
    assert str(Bounds(3.94, 37 / 43 * 7 / 8)) == "row bound 3.9x, head-row ceiling 75.3%"


class Sections:
    def __init__(self, sections: dict[str, Tensor]) -> None:
        self.sections = sections

    def section(self, name: str) -> Tensor:
        return self.sections[name]


POSITIONS = tuple(((layer, 7), ((layer + 3) % 7, 7)) for layer in range(7))
PROFILES = {
    **{name: found for name, found in SHIPPED.items() if found.reuses},
    "turbo with fences that skip": profile("turbo", fence_layers=2),
    "two fence layers": profile("combined", fence_layers=2, global_heads=(1, 5)),
    "by deviation": profile("rowsparse", selector=Selector.DEVIATION, deviation_layer=2),
    "no fence": profile("rowsparse", fence_layers=0),
    "one middle layer": profile("combined", fence_layers=3),
    "few experts": profile("rowsparse", fan_out=FanOutPolicy(k_min=2, tau=0.5)),
    "a head table": profile("combined", head_table=HeadTable(heads_per_group=8, positions=POSITIONS)),
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

    def of_heads(scope: Any, p: Any, rows: Any, heads: Any, *rest: Any) -> Tensor:
        seen.head_rows[scope.layer] += rows.size * heads.heads
        return attention(scope, p, rows, heads, *rest)

    monkeypatch.setattr(forward_module, "_projected", of_rows)
    monkeypatch.setattr(forward_module, "attention", of_heads)
    return seen


DOCUMENTS, QUERY = (200, 150), 40
TOTAL = 1 + sum(DOCUMENTS) + QUERY
RUNS = [KnownRun("0", 1, 0, 200, 200), KnownRun("1", 201, 0, 150, 150)]


def reuse(model: Model, chosen: Profile, everything: bool, seen: Seen) -> tuple[Counters, Rows]:
    """One request of two documents; ``seen`` holds the prefill without the probe."""
    documents = [tokens(length) for length in DOCUMENTS]
    ids = torch.cat((tokens(1), *documents, tokens(QUERY)))
    made = evaluate(model, documents, chosen.needs(), Counters(), heads=chosen.heads(model.geometry))
    sources = [Source(run, Sections(made[int(run.artifact_id)])) for run in RUNS]
    memory, counters = nan_memory(model.geometry), Counters()
    if chosen.reuses_rows:
        session = restored_session(memory, sources, TOTAL, 1)
    else:
        session = segmented_session(memory, RUNS, TOTAL, 1)
    rows = choose_rows(model, session, RUNS, ids, chosen, counters)
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
    local = heads - chosen.global_per_group * geometry.o_groups
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
    limits = bounds(geometry, chosen, rows)
    assert limits.row_bound == pytest.approx(sum(native) / counters.row_layers)
    assert limits.head_row_ceiling == structural_ceiling(geometry, chosen)
    assert counters.probe_row_layers == probe_row_layers(geometry, chosen, RUNS, TOTAL)
    assert (counters.probe_row_layers > 0) == (chosen.selector is not Selector.NONE)
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
    prefill(small.model, [dense_session(nan_memory(small.geometry), 90, 90)], [tokens(90)], counters)
    found = ledgers(small.geometry, SHIPPED[name], 90, counters, {})
    assert [found.head_rows.saved, found.token_rows.saved, found.arithmetic.saved] == [0, 0, 0]
    assert found.head_rows.share == found.token_rows.share == found.arithmetic.share == 0.0


def test_segments_share_one_merge(small: Oracle) -> None:
    """The same rows in two segments: windows and entries of all segments still meet once a row."""
    geometry, whole, cut = small.geometry, Counters(), Counters()
    prefill(small.model, [dense_session(nan_memory(geometry), 64, 64)], [tokens(64)], whole)
    prefill(
        small.model, [segmented_session(nan_memory(geometry), [KnownRun("0", 0, 0, 32, 32)], 64, 0)], [tokens(64)], cut
    )
    assert cut.flops == whole.flops


def test_ledgers_are_frozen() -> None:
    found = Saving(1, 4)
    assert found.share == 0.25
    assert Saving(0, 0).share == 0.0
    with pytest.raises(FrozenInstanceError):
        found.saved = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        found + found  # type: ignore[operator]
