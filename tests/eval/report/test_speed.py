"""Ratios are of pairs, warm-up does not count, and building has to be paid back."""

from __future__ import annotations

import math

import pytest

from eval.report.lengths import length_part
from eval.report.sections import sections
from eval.report.speed import break_even, build_seconds_a_token, by_length, chosen, speeds
from eval.results import Build, Timing
from tests.kit.report import cell, section, tables, timing
from tests.kit.results import make_run

DOCUMENTS = [{"length": 500, "reused": 400}, {"length": 300, "reused": 0}]


def build(**fields: object) -> Build:
    facts = {
        "run": "run-1",
        "dataset": "latest",
        "documents": 4,
        "tokens": 2000,
        "found": 0,
        "seconds": 2.0,
        "bytes": 1,
    }
    return Build(**(facts | fields))  # type: ignore[arg-type]


def test_ratios_are_of_pairs_and_not_of_medians() -> None:
    times = [(1.0, 0.5), (10.0, 1.0), (2.0, 1.0)]
    records = [
        timing(n, arm, s) for n, pair in enumerate(times) for arm, s in zip(("recompute", "turbo"), pair, strict=True)
    ]
    records += [timing(9, "turbo", 0.001), timing(-1, "turbo", 0.001, warmup=True)]
    found = speeds(section(records), section(records).timings)
    assert found["recompute"].request is None
    turbo = found["turbo"]
    assert turbo.request is not None
    assert (turbo.request.value, turbo.request.n, turbo.n) == (2.0, 3, 4)
    assert turbo.saved_s == 1.0
    assert found["recompute"].request_p95 == 10.0


def test_pairs_of_several_runs_are_not_mixed() -> None:
    first, second = make_run("a"), make_run("b", started="2026-01-03T00:00:00Z")
    early = [timing(n, arm, s, run="a") for n in range(3) for arm, s in (("recompute", 4.0), ("turbo", 1.0))]
    late = [timing(n, arm, s, run="b") for n in range(3) for arm, s in (("recompute", 8.0), ("headsplit", 4.0))]
    (found,) = sections([(first, early), (second, late)])
    ratios = {arm: speed.request for arm, speed in speeds(found, found.timings).items()}
    assert ratios["turbo"] is not None
    assert ratios["headsplit"] is not None
    assert (ratios["turbo"].value, ratios["headsplit"].value) == (4.0, 2.0)
    again = [record.model_copy(update={"run": "b", "ttft_request_s": 2.0}) for record in early]
    (found,) = sections([(first, early), (second, again)])
    assert {record.run for record in found.timings} == {"b"}  # timed again: the later run counts


def test_hot_and_cold_are_apart() -> None:
    records = [timing(0, arm, 1.0, state=state) for arm in ("recompute", "turbo") for state in ("hot", "cold")]
    found = section(records)
    assert [len(chosen(found, state)) for state in ("hot", "cold")] == [2, 2]
    assert chosen(found, "hot", "longbench") == chosen(found, "hot", "nanoqa", "other") == []


def test_lengths_are_grouped_by_the_nearest_power_of_two() -> None:
    lengths = (1, 1049, 1400, 1500, 2073, 8217)
    found = by_length([timing(n, "turbo", 1.0, prompt_tokens=tokens) for n, tokens in enumerate(lengths)])
    assert {of: len(timings) for of, timings in found.items()} == {1: 1, 1024: 2, 2048: 2, 8192: 1}


def test_break_even() -> None:
    records = [
        timing(n, a, s, report={"documents": DOCUMENTS})
        for n in range(3)
        for a, s in (("recompute", 1.0), ("turbo", 0.5))
    ]
    turbo = speeds(section(records), section(records).timings)["turbo"]
    assert turbo.document_tokens == 500  # the other document was new text
    assert break_even(turbo, 0.001) == pytest.approx(1.0)
    assert break_even(turbo, None) is None
    slower = [
        timing(n, a, s, report={"documents": DOCUMENTS})
        for n in range(3)
        for a, s in (("recompute", 1.0), ("turbo", 2.0))
    ]
    assert math.isinf(break_even(speeds(section(slower), section(slower).timings)["turbo"], 0.001) or 0)


@pytest.mark.parametrize(
    ("builds", "seconds"),
    [
        ([], None),
        ([build()], 0.001),
        ([build(found=4, seconds=0.1)], None),
        ([build(found=2, seconds=1.0)], 0.001),
        ([build(), build(found=4, seconds=0.0), build(seconds=6.0)], 0.002),
        ([build(documents=0, tokens=0)], None),
    ],
)
def test_what_was_found_was_not_built(builds: list[Build], seconds: float | None) -> None:
    assert build_seconds_a_token(builds) == seconds


@pytest.mark.parametrize("report", [{}, {"documents": None}, {"documents": {"all": 3}}, {"documents": ["x", {}]}])
def test_reports_that_say_nothing_of_documents(report: dict[str, object]) -> None:
    records: list[Timing] = [timing(0, arm, 1.0, report=report) for arm in ("recompute", "turbo")]
    assert speeds(section(records), records)["turbo"].document_tokens is None


def test_the_tables_by_length() -> None:
    records = [
        timing(n, arm, s * tokens, prompt_tokens=tokens, item=str(tokens))
        for n in range(3)
        for tokens in (1000, 4000)
        for arm, s in (("recompute", 0.002), ("turbo", 0.001))
    ]
    short, long = tables(length_part(section(records)))
    assert cell(short, "turbo", "request ratio") == "2.00x [2.00, 2.00]"
    assert (cell(short, "turbo", "Tokens"), cell(long, "turbo", "request p50 ms")) == ("1,000", "4,000")
    assert length_part(section([])) == []
