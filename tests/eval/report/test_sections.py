"""What counts: one table per checkpoint, the latest record of each, and nothing that was not measured fairly."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from eval.report import checks
from eval.report.sections import Section, sections
from eval.results import Answer, Load, Rejected, Run, Timing
from tests.kit.results import MODEL, answers, evaluation, fidelity, loads, make_run, timings

ARMS = ("recompute", "rowsparse", "no-documents")


def one_section(*runs: tuple[Run, list[Any]]) -> Section:
    (found,) = sections(list(runs))
    return found


def some_answers(run: Run, arms: tuple[str, ...] = ARMS) -> list[Answer]:
    return list(answers(run, arms, contexts=2, questions=2))


def changed(record: Any, **fields: Any) -> Any:
    return record.model_copy(update=fields)


def reasons(section: Section) -> Counter[str]:
    return Counter(record.reason for record in section.rejected)


def test_everything_of_a_sound_run_counts() -> None:
    made = evaluation(ARMS, contexts=3, questions=2)
    found = one_section((made.run, made.records))
    kinds = Counter(record.kind for record in made.records)
    assert len(found.answers) == kinds["answer"]
    assert len(found.timings) == sum(isinstance(r, Timing) and not r.warmup for r in made.records) > 0
    assert (len(found.fidelity), len(found.loads), len(found.builds)) == (kinds["fidelity"], kinds["load"], 1)
    assert [record.arm for record in found.rejected] == ["turbo"]
    assert list(found.arms) == ["recompute", "rowsparse", "noise-floor", "no-documents"]
    assert found.model == "nano"


@pytest.mark.parametrize(
    "other", [{"model": MODEL | {"weights": "0" * 64}}, {"engine": "sglang"}, {"tp": 2}, {"model": {"name": "nano"}}]
)
def test_other_checkpoints_engines_and_sizes_get_their_own_section(other: dict[str, Any]) -> None:
    first, second = make_run("a"), make_run("b", **other)
    found = sections([(first, some_answers(first)), (second, some_answers(second))])
    assert [section.runs for section in found] == [(first,), (second,)]
    assert all({answer.run for answer in section.answers} == {section.runs[0].run} for section in found)


def test_the_folder_of_a_checkpoint_does_not_matter() -> None:
    runs = [make_run("a"), make_run("b", model=MODEL | {"name": "elsewhere/nano"})]
    assert len(sections([(run, []) for run in runs])) == 1


def test_a_run_that_went_on_replaces_what_it_measured_again() -> None:
    first, second = make_run("a"), make_run("b", started="2026-01-02T04:00:00Z", options={"seed": 1, "contexts": 9})
    old = some_answers(first)
    new = [changed(answer, run="b", text="again") for answer in old[:5]]
    found = one_section((first, old), (second, new))
    assert len(found.answers) == len(old)
    assert sum(answer.text == "again" for answer in found.answers) == 5


@pytest.mark.parametrize("other", [{"options": {"seed": 2}}, {"tool": "longbench"}])
def test_another_seed_or_tool_asks_other_questions(other: dict[str, Any]) -> None:
    first, second = make_run("a"), make_run("b", **other)
    old = some_answers(first)
    new = [changed(answer, run="b", prompt_sha256=answer.prompt_sha256 + "2") for answer in old]
    found = one_section((first, old), (second, new))
    assert len(found.answers) == 2 * len(old)
    assert not found.rejected


def test_profiles_of_one_name_that_differ_are_two_arms() -> None:
    first, second = make_run("a"), make_run("b", digests=dict.fromkeys(make_run().arms, "9" * 64))
    found = one_section((first, some_answers(first)), (second, [changed(a, run="b") for a in some_answers(first)]))
    labels = {answer.arm for answer in found.answers}
    assert labels == {"recompute", "no-documents", "rowsparse 99999999", f"rowsparse {first.digests['rowsparse'][:8]}"}
    assert found.arms["rowsparse 99999999"]["name"] == "rowsparse"


def test_the_latest_verdict_counts() -> None:
    first, second = make_run("a"), make_run("b", started="2026-01-02T04:00:00Z")
    good = some_answers(first)
    refused = Rejected(run="a", dataset=good[1].dataset, item=good[1].item, arm=good[1].arm, reason="ran dense")
    answered_later = one_section((first, [*good[:1], refused, *good[2:]]), (second, [changed(good[1], run="b")]))
    assert (len(answered_later.answers), len(answered_later.rejected)) == (len(good), 0)
    refused_later = one_section((first, good), (second, [changed(refused, run="b")]))
    assert (len(refused_later.answers), len(refused_later.rejected)) == (len(good) - 1, 1)


def test_a_rejection_of_the_same_run_stays() -> None:
    run = make_run()
    good = some_answers(run)
    refused = Rejected(run=run.run, dataset=good[1].dataset, item=good[1].item, arm=good[1].arm, reason="ran dense")
    assert len(one_section((run, [refused, *good])).rejected) == 1


@pytest.mark.parametrize(
    ("fields", "reason", "lost"),
    [
        ({"prompt_sha256": "other"}, checks.UNEQUAL_TOKENS, 3),
        ({"max_new_tokens": 9}, checks.UNEQUAL_CAPS, 3),
        ({"score": math.nan}, checks.NOT_A_SCORE, 1),
        ({"score": 1.5}, checks.NOT_A_SCORE, 1),
        ({"score": -math.inf}, checks.NOT_A_SCORE, 1),
        ({"kl": math.inf}, checks.NOT_A_DIVERGENCE, 1),
        ({"kl": -0.5}, checks.NOT_A_DIVERGENCE, 1),
        ({"report": {"arm": "dense"}}, checks.RAN_DENSE, 1),
    ],
)
def test_answers_that_do_not_count(fields: dict[str, Any], reason: str, lost: int) -> None:
    run = make_run()
    good = some_answers(run)
    at = next(number for number, answer in enumerate(good) if answer.arm == "rowsparse")
    found = one_section((run, [*good[:at], changed(good[at], **fields), *good[at + 1 :]]))
    assert reasons(found) == {reason: lost}
    assert len(found.answers) == len(good) - lost
    assert {(r.dataset, r.item) for r in found.rejected} == {(good[at].dataset, good[at].item)}


def test_recompute_may_run_dense_and_rounding_may_go_below_zero() -> None:
    run = make_run()
    good = [changed(answer, kl=-1e-9) for answer in some_answers(run)]
    assert not one_section((run, good)).rejected


@pytest.mark.parametrize(
    ("fields", "reason", "lost"),
    [
        ({"prompt_sha256": "other"}, checks.UNEQUAL_TOKENS, 2),
        ({"ttft_request_s": 0.0}, checks.NOT_A_TIME, 1),
        ({"ttft_forward_s": math.nan}, checks.NOT_A_TIME, 1),
        ({"ttft_request_s": math.inf}, checks.NOT_A_TIME, 1),
        ({"report": {"arm": "dense"}}, checks.RAN_DENSE, 1),
    ],
)
def test_timings_that_do_not_count(fields: dict[str, Any], reason: str, lost: int) -> None:
    run = make_run()
    good = list(timings(run, ("recompute", "rowsparse"), pairs=3))
    at = next(number for number, t in enumerate(good) if t.arm == "rowsparse" and not t.warmup)
    found = one_section((run, [*good[:at], changed(good[at], **fields), *good[at + 1 :]]))
    assert reasons(found) == {reason: lost}
    assert len(found.timings) == sum(not timing.warmup for timing in good) - lost


def test_other_records_that_do_not_count() -> None:
    run = make_run()
    first, *rest = fidelity(run, ("rowsparse",))
    load, failed, *others = loads(run, ("recompute",))
    records = [
        changed(first, layers=(0.1, math.nan)),
        changed(rest[0], top1=1.2),
        *rest[1:],
        changed(load, ttft_s=-1.0, error=""),
        changed(failed, ttft_s=math.nan, error="timed out"),
        *others,
    ]
    found = one_section((run, records))
    assert reasons(found) == {checks.NOT_A_DIVERGENCE: 1, checks.NOT_A_SHARE: 1, checks.NOT_A_TIME: 1}
    assert len(found.loads) == len(others) + 1
    assert any(isinstance(record, Load) and record.error for record in found.loads)
