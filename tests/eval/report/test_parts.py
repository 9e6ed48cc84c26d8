"""The parts below the summary: ledgers, fidelity, serving, ablations, texts, rejections and provenance."""

from __future__ import annotations

from typing import Any

import pytest

from eval.report.ablation import ablation_part, families
from eval.report.blocks import Fold, Paragraph, SideBySide
from eval.report.fidelity import fidelity_part, noise_floor
from eval.report.groups import groups_part
from eval.report.ledgers import books, ledger_part
from eval.report.provenance import provenance_part, rejected_part
from eval.report.serving import levels, serving_part
from eval.report.texts import SAMPLES, texts_part
from eval.results import Fidelity, Load, Rejected
from redknot.model.profile import SHIPPED
from tests.kit.report import answer, cell, section, tables, timing
from tests.kit.results import ARMS, engine_report, make_run, profiles


def report(token_rows: int, head_rows: int, flops: int, **wall: float) -> dict[str, Any]:
    shares = {"token_rows": token_rows, "head_rows": head_rows, "arithmetic": flops}
    return {"ledgers": {k: {"saved": v, "whole": 100, "share": 9.9} for k, v in shares.items()} | {"wall_clock": wall}}


def test_ledgers_stay_apart() -> None:
    """Shares are of each ledger's own whole; nothing holds their sum."""
    records = []
    for pair in range(4):
        records.append(timing(pair, "recompute", 2.0, report=report(0, 0, 0, ttft_request_s=2.0)))
        records.append(timing(pair, "turbo", 0.5, report=report(80, 70 + pair, -5, ttft_request_s=0.5, match_s=0.01)))
    shares, timers = tables(ledger_part(section(records)))
    assert shares.header == ("Arm", "Requests", "token rows", "head rows", "FLOPs", "wall clock")
    assert shares.rows[1] == ("turbo", "4", "80.0 %", "71.5 %", "−5.0 %", "75.0 %")
    assert timers.rows == (("recompute", "–", "2,000"), ("turbo", "10.0", "500"))


@pytest.mark.parametrize(
    "ledgers",
    [
        None,
        3,
        [],
        {"token_rows": 7},
        {"token_rows": {}},
        {"token_rows": {"saved": "x", "whole": None}, "wall_clock": 1},
    ],
)
def test_ledgers_of_somebody_else(ledgers: object) -> None:
    found = books([{"ledgers": ledgers}, {}])
    assert found.shares == {}
    assert ledger_part(section([timing(0, "turbo", 1.0, report={"ledgers": ledgers})])) is not None


def test_no_ledgers_no_part() -> None:
    assert ledger_part(section([answer("1", "recompute", 1.0)])) == []


def fidelity(arm: str, item: str, *layers: float, **other: Any) -> Fidelity:
    facts: dict[str, Any] = {"run": "run-1", "dataset": "latest", "prompt_tokens": 9, "kl": layers[-1], "top1": 0.5}
    return Fidelity(arm=arm, item=item, layers=layers, **(facts | other))


def test_fidelity_beside_the_noise_floor() -> None:
    records = [
        fidelity("turbo", "1", 0.1, 0.3),
        fidelity("turbo", "2", 0.3, 0.5),
        fidelity("noise-floor", "1", 0.0, 1e-7),
    ]
    found = section(records)
    summary, layers = tables(fidelity_part(found))
    assert cell(summary, "turbo", "KL").startswith("0.400 [")
    assert cell(summary, "noise-floor", "Prompts") == "1"
    assert layers.header == ("Layer", "turbo", "noise-floor")
    assert layers.rows == (("0", "2.00e-01", "0.00e+00"), ("1", "4.00e-01", "1.00e-07"))
    assert noise_floor(found).startswith(
        "Noise floor, recompute run another way: KL 1e-07, top-1 50.0, over 1 prompts."
    )


def test_without_a_noise_floor_the_report_says_so() -> None:
    found = section([fidelity("turbo", "1", 0.1)])
    assert noise_floor(found) == ""
    assert any(isinstance(block, Paragraph) and block.warning for block in fidelity_part(found))
    assert fidelity_part(section([])) == []


def test_no_layers_at_all() -> None:
    (summary,) = tables(fidelity_part(section([fidelity("turbo", "1", 0.1).model_copy(update={"layers": ()})])))
    assert cell(summary, "turbo", "Prompts") == "1"


def load(arm: str, turn: int, number: int, ttft: float, **other: Any) -> Load:
    facts: dict[str, Any] = {"run": "run-1", "dataset": "fixed", "level": 2.0, "prompt_tokens": 9, "new_tokens": 10}
    facts |= {"arrived_s": float(number), "latency_s": ttft + 1, "report": {}, "round": turn, "number": number}
    return Load(arm=arm, ttft_s=ttft, **(facts | other))


def test_serving_by_level() -> None:
    records = [
        load(arm, r, n, s) for arm, s in (("recompute", 1.0), ("turbo", 0.25)) for r in range(3) for n in range(4)
    ]
    records[-1] = records[-1].model_copy(update={"error": "gone"})
    found = levels(section(records), records)
    assert list(found) == [(2.0, "recompute"), (2.0, "turbo")]
    base, turbo = found.values()
    assert base.ratio is None
    assert turbo.ratio is not None
    assert (turbo.ratio.value, turbo.ratio.n) == (4.0, 11)
    assert (turbo.requests, turbo.errors) == (12, 1)
    assert base.requests_a_second.value == pytest.approx(4 / 5)  # four requests, the last ends 3 + 2 s behind the start
    assert base.tokens_a_second.value == pytest.approx(40 / 5)
    (shown,) = tables(serving_part(section(records)))
    assert shown.header[:2] == ("Requests a second that arrive", "Arm")
    assert cell(shown, "turbo", "Errors") == "1 [1.5 %, 35.4 %]"
    assert cell(shown, "turbo", "TTFT p50 ms") == "250 [250, 250]"


def test_a_server_that_answered_nothing() -> None:
    records = [load("turbo", 0, n, 1.0, error="refused") for n in range(3)]
    (found,) = levels(section(records), records).values()
    assert (found.ttft_p50, found.errors, found.requests_a_second.value) == (None, 3, 0.0)
    assert len(tables(serving_part(section(records)))) == 1


def test_open_and_closed_loops_are_not_mixed() -> None:
    records = [load("turbo", 0, n, 1.0, loop=loop) for n in range(3) for loop in ("open", "closed")]
    closed, opened = tables(serving_part(section(records)))
    assert (closed.header[0], opened.header[0]) == ("Clients", "Requests a second that arrive")


def test_families_come_from_profiles_and_not_from_names() -> None:
    arms = profiles(tuple(ARMS)) | {
        "anything": SHIPPED["rowsparse"].model_dump(mode="json") | {"name": "anything", "fence_layers": 2},
        "heads": SHIPPED["headsplit"].model_dump(mode="json") | {"name": "heads", "global_heads": [3]},
        "no-documents": {},
    }
    found = {(family.base, family.field): list(family.values) for family in families(arms)}
    assert found == {
        ("rowsparse", "middle_active"): ["rowsparse", "combined"],
        ("rowsparse", "budget"): ["rowsparse", "rowsparse-20", "rowsparse-25"],
        ("rowsparse", "fan_out"): ["rowsparse", "fixed-3", "adaptive-80"],
        ("rowsparse", "fence_layers"): ["rowsparse", "anything"],
        ("headsplit", "global_heads"): ["headsplit", "heads"],
        ("turbo", "protected.first_windows"): ["turbo", "plain"],
    }
    assert families({"rowsparse": {}, "x": {"budget": 1}}) == []
    (grown,) = families({"rowsparse": {"a": 1}, "x": {"a": 1, "new": [2]}})
    assert (grown.field, grown.values) == ("new", {"rowsparse": "not set", "x": "[2]"})


def test_an_ablation_compares_with_its_base() -> None:
    arms = ("recompute", "rowsparse", "rowsparse-20", "rowsparse-25")
    scores = {"recompute": 1.0, "rowsparse": 0.5, "rowsparse-20": 0.75}
    records: list[Any] = [answer(str(n), arm, score) for n in range(4) for arm, score in scores.items()]
    records += [timing(n, arm, s) for n in range(3) for arm, s in (("recompute", 1.0), ("rowsparse", 0.5))]
    (found,) = tables(ablation_part(section(records, make_run(arms=arms)), "nanoqa"))
    assert found.header == ("Arm", "budget", "Score", "To recompute", "To rowsparse", "Hot TTFT ratio")
    assert [row[:2] for row in found.rows] == [("rowsparse", "0.1"), ("rowsparse-20", "0.2")]
    assert cell(found, "rowsparse-20", "To rowsparse") == "+25.0 [−24.0, +74.0]"
    assert cell(found, "rowsparse-20", "To recompute") == "−25.0 [−74.0, +24.0]"


def test_texts_that_differ_most_lost_in_front() -> None:
    records = []
    for n in range(9):
        records.append(answer(str(n), "recompute", 1.0, text="right"))
        records.append(answer(str(n), "turbo", 1.0 if n < 3 else 0.0, text="right" if n < 2 else f"wrong {n}"))
        records.append(answer(str(n), "no-documents", 0.0, text="nothing"))
    found = [block for block in texts_part(section(records)) if isinstance(block, Fold)]
    assert [fold.title for fold in found] == ["turbo on latest: 7 of 9 texts differ from recompute's"]
    pairs = [block for block in found[0].blocks if isinstance(block, SideBySide)]
    assert [pair.right[1] for pair in pairs] == [f"wrong {n}" for n in range(3, 3 + SAMPLES)]
    assert texts_part(section([answer("1", "turbo", 1.0)])) == []


def test_long_texts_are_cut() -> None:
    records = [answer("1", "recompute", 1.0, references=("r" * 999,) * 9), answer("1", "turbo", 0.0, text="x" * 10**6)]
    (fold,) = (block for block in texts_part(section(records)) if isinstance(block, Fold))
    (pair,) = fold.blocks
    assert isinstance(pair, SideBySide)
    assert pair.right[1] == "x" * 400 + "… (999,600 more characters)"
    assert pair.about.endswith("and 6 more")
    assert len(pair.about) < 700


def test_rejections_are_counted_and_their_list_is_bounded() -> None:
    records = [Rejected(run="run-1", dataset="a", item=str(n), arm="turbo", reason="ran dense") for n in range(7)]
    records += [Rejected(run="run-1", dataset="a", item="1", arm="turbo", reason=f"reason {n}") for n in range(50)]
    (found,) = tables(rejected_part(section(records)))
    assert found.rows[0] == ("a", "turbo", "ran dense", "7")
    assert len(found.rows) == 21
    assert found.rows[-1] == ("others", "", "31 more combinations", "31")
    assert tables(rejected_part(section([]))) == []


def test_provenance_names_no_folder_of_a_machine() -> None:
    command = ("/somewhere/python", "-m", "eval.nanoqa", "--out", "build/eval", "a b")
    options = {"store": "/somewhere/else/store", "data": {"files": ["/x/y/z.jsonl"]}, "seed": 3}
    run = make_run(command=command, options=options, commit="abc+")
    blocks = provenance_part(section([answer("1", "recompute", 1.0, cut=True)], run))
    facts = {row[0]: row[1] for row in tables(blocks)[-1].rows}
    assert facts["command"] == "…/python -m eval.nanoqa --out build/eval 'a b'"
    assert facts["option data"] == '{"files": ["…/z.jsonl"]}'
    assert facts["option store"] == "…/store"
    assert (facts["option seed"], facts["commit"], facts["version of torch"]) == ("3", "abc+", "2.13.0")
    texts = [block.text for block in blocks if isinstance(block, Paragraph)]
    assert texts == [
        "Some runs had files that differed from their commit (marked +).",
        "Prompts whose middle was cut out to fit: 1 of 1.",
    ]


def test_the_made_up_reports_hold_what_an_engine_reports() -> None:
    assert books([engine_report("turbo", 1024, 0.5, 0.1)]).shares["token_rows"] == 0.5


def test_scores_by_group() -> None:
    """LongBench-E's lengths stand beside each other; what has no group is not in them."""
    records = []
    for group, scores in (("0-4k", (1.0, 0.5)), ("8k+", (0.25, 0.75))):
        for number, score in enumerate(scores):
            item = f"{group} {number}"
            records.append(answer(item, "recompute", 1.0, group=group))
            records.append(answer(item, "turbo", score, group=group))
    records += [answer("one", "plain", 0.5, group="0-4k"), answer("none", "turbo", 0.0)]
    (found,) = tables(groups_part(section(records), "nanoqa"))
    assert found.header == ("Arm", "0-4k", "0-4k, difference", "8k+", "8k+, difference")
    assert cell(found, "turbo", "0-4k").startswith("75.0 [")
    assert cell(found, "turbo", "0-4k").endswith("] (2)")
    assert cell(found, "turbo", "8k+, difference").startswith("−50.0 [")
    assert cell(found, "plain", "8k+") == "–"
    assert groups_part(section(records[-1:]), "nanoqa") == []
    assert groups_part(section(records), "longbench") == []
