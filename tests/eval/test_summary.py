"""The few lines at the end of a run."""

from __future__ import annotations

from eval.arms import find_arms
from eval.results import Rejected, Timing
from eval.summary import as_text, summary
from tests.eval.conftest import make_run
from tests.eval.test_recorder import an_answer

RUN = make_run(find_arms(["turbo"]))


def scored(arm, *scores):
    return [
        an_answer(item=str(number), arm=arm).model_copy(update={"score": score}) for number, score in enumerate(scores)
    ]


def timed(pair, arm, seconds, **changes):
    fields = {"warmup": False, "position": 0, "state": "hot", "prompt_tokens": 3, "prompt_sha256": "s", "report": {}}
    times = {"ttft_request_s": seconds, "ttft_forward_s": seconds}
    return Timing(run="r1", dataset="d", item="1", pair=pair, arm=arm, **(fields | times | changes))


def test_arms_are_in_the_order_of_the_run_and_others_runs_are_left_out():
    other = RUN.model_copy(update={"run": "r2", "tool": "ruler"})
    records = [RUN, *scored("turbo", 1, 0), *scored("recompute", 1, 1), *scored("no-documents", 0, 0), other]
    records += [an_answer(run="r2", item="9")]
    lines = summary(records, "longbench")
    assert [(line.arm, line.n, line.score) for line in lines] == [
        ("recompute", 2, 1.0),
        ("turbo", 2, 0.5),
        ("no-documents", 2, 0.0),
    ]
    assert {line.informative for line in lines} == {True}


def test_ten_points_are_enough_to_be_informative():
    def informative(*scores):
        records = [RUN, *scored("recompute", *scores), *scored("no-documents", *([0.0] * len(scores)))]
        return summary(records, "longbench")[0].informative

    assert informative(*([1.0] + [0.0] * 9))
    assert not informative(*([1.0] + [0.0] * 10))
    lines = summary([RUN, *scored("turbo", 1.0)], "longbench")
    assert lines[0].informative is None
    assert "not informative" not in as_text(lines)


def test_ratios_are_of_hot_measured_whole_pairs():
    records = [RUN, *scored("recompute", 1.0)]
    for pair, (slow, fast) in enumerate([(4.0, 1.0), (6.0, 1.0), (9.0, 1.0)]):
        records += [timed(pair, "turbo", fast), timed(pair, "recompute", slow)]
    records += [timed(3, "turbo", 1.0, warmup=True), timed(3, "recompute", 99.0, warmup=True)]
    records += [timed(4, "turbo", 1.0, state="cold"), timed(4, "recompute", 99.0, state="cold")]
    records += [timed(5, "turbo", 1.0)]
    recompute, turbo = summary(records, "longbench")
    assert turbo.ttft_ratio == 6.0
    assert recompute.ttft_ratio is None


def test_rejected_results_are_counted_and_data_sets_that_tell_nothing_named():
    gone = Rejected(run="r1", dataset="d", item="1", arm="turbo", reason="ran dense")
    text = as_text(summary([RUN, *scored("recompute", 0.0), *scored("no-documents", 0.0), gone], "longbench"))
    assert "d: not informative, documents are worth less than 10 points" in text
    assert text.splitlines()[2].split() == ["d", "turbo", "0", "1"]
