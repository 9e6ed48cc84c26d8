"""A folder's results over several runs: what is there, what belongs to it, and what must not be mixed in."""

from __future__ import annotations

import pytest

from eval.arms import find_arms
from eval.names import TIMING_REJECTED
from eval.recorder import Recorder
from eval.results import Answer, Rejected, Run, read_results
from redknot.errors import ConfigError
from tests.eval.conftest import make_run

ARMS = find_arms(["turbo"])


def an_answer(run: str = "r1", item: str = "1", arm: str = "turbo") -> Answer:
    return Answer(
        run=run,
        dataset="d",
        item=item,
        cluster=item,
        arm=arm,
        prompt_tokens=3,
        prompt_sha256="s",
        max_new_tokens=4,
        cut=False,
        text="t",
        references=("t",),
        score=1.0,
        report={},
    )


def rejected(item: str, reason: str) -> Rejected:
    return Rejected(run="r1", dataset="d", item=item, arm="turbo", reason=reason)


def test_a_run_stands_in_front_of_its_first_record(tmp_path):
    recorder = Recorder(tmp_path, make_run(ARMS), ())
    recorder.served_by({"sglang": "0.5.23"})
    recorder.add(an_answer())
    recorder.add(an_answer(item="2"))
    recorder.close()
    run, *answers = read_results(recorder.path)
    assert isinstance(run, Run)
    assert run.versions == {"redknot": "0", "sglang": "0.5.23"}
    assert len(answers) == 2


def test_a_run_that_adds_nothing_leaves_nothing(tmp_path):
    Recorder(tmp_path, make_run(ARMS), ()).close()
    assert list(read_results(tmp_path / "results.jsonl")) == []


def test_what_is_answered_or_rejected_is_done_and_timing_is_another_matter(tmp_path):
    recorder = Recorder(tmp_path, make_run(ARMS), ())
    for record in (an_answer(), rejected("2", "ran dense"), rejected("3", TIMING_REJECTED + "ran dense")):
        recorder.add(record)
    assert recorder.answered("d") == {("1", "turbo"), ("2", "turbo")}
    assert recorder.answered("e") == set()
    assert recorder.timed("d", "3", 10) == {"turbo"}
    assert recorder.timed("d", "2", 10) == set()


OTHER = {"name": "small", "config": "c", "weights": "x", "tokenizer": "t", "dtype": "float32"}


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"model": OTHER}, "the model's weights differ"),
        ({"digests": {"turbo": "0", "recompute": ARMS["recompute"].profile.digest()}}, "profile turbo differ"),
        ({"engine": "sglang"}, "the engine differ"),
        ({"tp": 2}, "the engine differ"),
        ({"options": {"seed": 2, "limit": 4}}, "option seed differ"),
        ({"options": {"limit": 4}}, "option seed differ"),
    ],
)
def test_other_runs_are_not_mixed_in(tmp_path, changes, differing):
    first = Recorder(tmp_path, make_run(ARMS, options={"seed": 1, "limit": 3}), ("seed",))
    first.add(an_answer())
    first.close()
    before = first.path.read_bytes()
    with pytest.raises(ConfigError, match=rf"{differing}; give another --out"):
        Recorder(tmp_path, make_run(ARMS, run="r2", **({"options": {"seed": 1, "limit": 9}} | changes)), ("seed",))
    assert first.path.read_bytes() == before


def test_more_arms_more_items_another_name_and_another_tool_belong(tmp_path):
    first = Recorder(tmp_path, make_run(ARMS, options={"seed": 1, "limit": 3}), ("seed",))
    first.add(an_answer())
    first.close()
    named = make_run(ARMS).model | {"name": "moved"}
    more = find_arms(["turbo", "rowsparse"])
    for run in (
        make_run(more, run="r2", model=named, options={"seed": 1, "limit": 9}),
        make_run(ARMS, run="r3", tool="ruler", options={"seed": 7}),
    ):
        recorder = Recorder(tmp_path, run, ("seed",))
        assert recorder.answered("d") == {("1", "turbo")}
        recorder.close()
