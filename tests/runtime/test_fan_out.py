"""Adaptive fan-out alone: every row runs, the middle layers with fewer experts; nothing is reused or restored."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch

from redknot.errors import RequestReason, ReuseUnavailableError
from redknot.model.profile import FanOutPolicy, load_profile
from redknot.ops import moe
from redknot.runtime import forward as forward_module
from redknot.runtime.engine import Engine, Result
from redknot.runtime.ledger import recompute_flops, recompute_row_layers
from tests.kit.requests import LAYERS, ROOT, document
from tests.runtime.conftest import Served
from tests.runtime.test_metrics import samples

FAN_OUT = load_profile(str(ROOT / "configs/profiles/fan-out.json"))
LENGTH = 1100  # more than one chunk
FENCE = 1


@pytest.fixture(scope="module")
def engine(served: Served) -> Iterator[Engine]:
    with Engine(served.checkpoint, profile=FAN_OUT) as made:
        yield made


def ask(engine: Engine, reuse: str = "auto", length: int = LENGTH) -> Result:
    return engine.generate(token_ids=document(length, 1), reuse=reuse, max_new_tokens=3, stop_at_eos=False)


def test_the_middle_layers_drop_experts_and_the_fences_do_not(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen where a layer routes: the policy of each call, once a chunk and layer; decode runs all experts."""
    seen: list[moe.FanOut | None] = []
    native = moe.route

    def route(weights, x, token_ids, geometry, fan_out=None):  # type: ignore[no-untyped-def]
        seen.append(fan_out)
        return native(weights, x, token_ids, geometry, fan_out)

    monkeypatch.setattr(forward_module, "route", route)
    ask(engine)
    middle = [moe.FanOut(3, 0.8)] * (len(LAYERS) - 2 * FENCE)
    assert seen[: 2 * len(LAYERS)] == [None, *middle, None] * 2
    assert seen[2 * len(LAYERS) :] == [None] * len(LAYERS) * 2


def test_the_report_says_what_was_dropped(engine: Engine) -> None:
    report, geometry = ask(engine).report, engine.model.geometry
    assert (report.arm, report.reason, report.detail, report.profile) == ("fan-out", None, "", "fan-out")
    assert (report.cached_tokens, report.reused_tokens, report.forwarded_rows) == (0, 0, LENGTH)
    assert (report.documents, report.bounds) == ((), None)
    ran, native = report.counters, geometry.experts_per_token
    assert ran.row_layers == recompute_row_layers(geometry, LENGTH)
    middle, fences = LENGTH * (len(LAYERS) - 2), LENGTH + 1  # of the last layer the last row
    assert sum(ran.fan_out.values()) == middle + fences
    assert min(ran.fan_out) >= 3
    assert ran.fan_out[native] >= fences
    assert ran.expert_pairs == sum(kept * rows for kept, rows in ran.fan_out.items())
    dropped = ran.expert_pairs_native - ran.expert_pairs
    assert dropped > 0
    assert report.ledgers.token_rows.saved == report.ledgers.head_rows.saved == 0
    assert report.ledgers.arithmetic.saved == 6 * dropped * geometry.hidden_size * geometry.expert_width
    assert report.ledgers.arithmetic.whole == recompute_flops(geometry, LENGTH)


def test_a_policy_that_keeps_every_expert_is_recompute(served: Served, engine: Engine) -> None:
    """Over the same stages."""
    everything = FAN_OUT.model_copy(
        update={"fan_out": FanOutPolicy(k_min=engine.model.geometry.experts_per_token, tau=1)}
    )
    with Engine(engine.loaded, profile=everything) as same:
        found, expected = ask(same), ask(engine, "off")
    assert found.report.arm == "fan-out"
    assert found.token_ids == expected.token_ids
    assert torch.allclose(found.logits, expected.logits, rtol=0, atol=1e-5 * float(expected.logits.abs().max()))
    assert found.report.ledgers.arithmetic.saved == 0
    assert not torch.equal(ask(engine).logits, expected.logits)


def test_off_is_recompute_and_required_is_refused(served: Served, engine: Engine) -> None:
    off = ask(engine, "off")
    assert (off.report.arm, off.report.reason) == ("dense", RequestReason.REUSE_OFF)
    with Engine(engine.loaded, profile="recompute") as recompute:
        assert torch.equal(off.logits, ask(recompute).logits)
    with pytest.raises(ReuseUnavailableError, match="profile fan-out reuses nothing"):
        ask(engine, "required")


@pytest.mark.parametrize("length", [1, 2, 33])
def test_short_prompts(engine: Engine, length: int) -> None:
    report = ask(engine, length=length).report
    assert (report.arm, report.forwarded_rows) == ("fan-out", length)
    assert engine.check_books() == []


def test_a_profile_that_does_not_fit_the_model_runs_dense(engine: Engine) -> None:
    with Engine(engine.loaded, profile=FAN_OUT.model_copy(update={"fence_layers": 3})) as other:
        report = ask(other).report
    assert (report.arm, report.reason) == ("dense", RequestReason.UNSUPPORTED_MODEL)
    assert "5 layers leave no middle for 3+3 fence layers" in report.detail
    assert report.ledgers.arithmetic.saved == 0


def test_it_is_an_arm_of_its_own_in_the_metrics(engine: Engine) -> None:
    with Engine(engine.loaded, profile=FAN_OUT) as fresh:
        before = samples(fresh.metrics)
        ask(fresh, length=40)
        after = samples(fresh.metrics)
    assert before["redknot_requests_total{arm=fan-out}"] == 0
    assert after["redknot_requests_total{arm=fan-out}"] == 1
    assert after["redknot_requests_total{arm=dense}"] == 0
    assert sum(value for name, value in after.items() if name.startswith("redknot_fallbacks_total")) == 0
    run, native = (after[f"redknot_expert_pairs_{name}_total{{arm=fan-out}}"] for name in ("run", "native"))
    assert 0 < run < native


def test_reports_are_plain_json(engine: Engine) -> None:
    body = ask(engine, length=40).report.to_dict()
    assert (body["arm"], body["reason"], body["bounds"]) == ("fan-out", None, None)
    assert math.isclose(
        body["ledgers"]["arithmetic"]["share"],
        body["ledgers"]["arithmetic"]["saved"] / body["ledgers"]["arithmetic"]["whole"],
    )
    assert dataclasses.asdict(ask(engine, length=40).report.counters)["fan_out"] == body["counters"]["fan_out"]
