"""Scores, differences and what they lead to, on answers whose figures are known."""

from __future__ import annotations

import pytest

from eval.report.quality import counted, data_sets, overall, share
from eval.report.standing import fastest, standings
from eval.report.summary import summary
from eval.results import Rejected
from tests.kit.report import answer, cell, section, tables, timing
from tests.kit.results import make_run


def test_means_and_paired_differences() -> None:
    """Arm b lacks item 3, so that its difference is over items 1 and 2 alone."""
    base = [answer(str(n), "recompute", score) for n, score in enumerate((0.0, 1.0, 1.0, 1.0))]
    arm = [answer(str(n), "rowsparse", score, kl=0.5, top1=n > 0) for n, score in enumerate((1.0, 0.0, 1.0))]
    (found,) = data_sets(section([*base, *arm]), "nanoqa")
    recompute, rowsparse = found.arms["recompute"], found.arms["rowsparse"]
    assert (recompute.score.value, recompute.difference, recompute.kl, recompute.top1) == (0.75, None, None, None)
    assert rowsparse.score.value == pytest.approx(2 / 3)
    assert rowsparse.difference is not None
    assert rowsparse.difference.n == 3
    assert rowsparse.difference.value == pytest.approx(0)
    assert rowsparse.kl is not None
    assert rowsparse.kl.value == 0.5
    assert rowsparse.top1 is not None
    assert rowsparse.top1.value == pytest.approx(2 / 3)


def test_items_of_a_context_are_one() -> None:
    records = [answer(f"{c}-{q}", "recompute", float(c % 2), cluster=str(c)) for c in range(8) for q in range(5)]
    (found,) = data_sets(section(records), "nanoqa")
    apart = [one.model_copy(update={"cluster": one.item}) for one in records]
    (wider, narrower) = (share(of.arms["recompute"].score) for of in (found, *data_sets(section(apart), "nanoqa")))
    assert wider is not None
    assert narrower is not None
    assert wider.low is not None
    assert narrower.low is not None
    assert wider.low < narrower.low


@pytest.mark.parametrize(("right", "informative"), [(10, False), (19, False), (20, True), (100, True)])
def test_recompute_must_beat_no_documents_by_ten_points(right: int, informative: bool) -> None:
    records = [answer(str(n), "recompute", float(n < right)) for n in range(100)]
    records += [answer(str(n), "no-documents", float(n < 10)) for n in range(100)]
    (found,) = data_sets(section(records), "nanoqa")
    assert found.informative is informative


def test_sets_that_are_not_informative_do_not_decide() -> None:
    records = []
    for dataset, without in (("good", 0.0), ("dull", 1.0)):
        for n in range(4):
            records += [answer(str(n), "recompute", 1.0, dataset=dataset)]
            records += [answer(str(n), "no-documents", without, dataset=dataset)]
            records += [answer(str(n), "turbo", 0.5 if dataset == "good" else 1.0, dataset=dataset)]
    sets = data_sets(section(records), "nanoqa")
    assert [of.name for of in counted(sets)] == ["good"]
    assert overall(counted(sets))["turbo"].score.value == 0.5
    assert counted(sets[:1]) == sets[:1]  # where only a dull one is left, it is shown after all
    blocks = summary(standings(section(records), "nanoqa"), iter(["a.svg"]), "")
    texts = [getattr(block, "text", "") for block in blocks]
    assert any(text.startswith("dull: not informative") for text in texts)


def test_an_arm_that_lacks_a_set_has_no_mean_over_all() -> None:
    records = [answer("1", arm, 1.0, dataset=d) for d in ("a", "b") for arm in ("recompute", "turbo", "headsplit")]
    records = [record for record in records if (record.arm, record.dataset) != ("turbo", "b")]
    assert list(overall(data_sets(section(records), "nanoqa"))) == ["recompute", "headsplit"]


def test_the_choice_is_the_fastest_arm_within_the_margin_on_every_set() -> None:
    records = []
    for n in range(200):
        for dataset in ("a", "b"):
            records += [answer(str(n), "recompute", 1.0, dataset=dataset)]
            records += [answer(str(n), "combined", 1.0, dataset=dataset)]
            records += [answer(str(n), "rowsparse", float(n % 100 > 0), dataset=dataset)]
            records += [answer(str(n), "turbo", float(dataset == "a" or n % 10 > 0), dataset=dataset)]
    for arm, seconds in (("recompute", 8.0), ("combined", 4.0), ("rowsparse", 2.0), ("turbo", 1.0)):
        records += [timing(pair, arm, seconds) for pair in range(10)]
    found = standings(section(records), "nanoqa")
    choices = [arm.arm if (arm := fastest(found, margin)) else None for margin in (0.02, 0.05, 0.5)]
    assert choices == ["combined", "rowsparse", "turbo"]
    turbo = next(standing for standing in found.arms if standing.arm == "turbo")
    assert turbo.weakest is not None
    assert turbo.weakest[0] == "b"
    assert turbo.weakest[1].value == pytest.approx(-0.1)


def test_an_arm_that_is_slower_or_of_one_context_is_no_choice() -> None:
    slow = [answer(str(n), arm, 1.0) for n in range(30) for arm in ("recompute", "turbo")]
    slow += [timing(pair, arm, s) for pair in range(9) for arm, s in (("recompute", 1.0), ("turbo", 2.0))]
    assert fastest(standings(section(slow), "nanoqa"), 0.5) is None
    one = [record.model_copy(update={"cluster": "same"}) if hasattr(record, "cluster") else record for record in slow]
    one = [r.model_copy(update={"ttft_request_s": 0.1}) if r.arm == "turbo" and hasattr(r, "pair") else r for r in one]
    assert fastest(standings(section(one), "nanoqa"), 0.5) is None


@pytest.mark.parametrize(("contexts", "chosen"), [(19, None), (20, "turbo")])
def test_few_contexts_decide_nothing(contexts: int, chosen: str | None) -> None:
    records = [
        answer(f"{c}-{q}", arm, 1.0, cluster=str(c))
        for c in range(contexts)
        for q in range(20)
        for arm in ("recompute", "turbo")
    ]
    records += [timing(pair, arm, s) for pair in range(9) for arm, s in (("recompute", 0.4), ("turbo", 0.1))]
    found = fastest(standings(section(records), "nanoqa"), 0.02)
    assert (found.arm if found else None) == chosen


def test_the_tables_say_what_was_computed() -> None:
    records = [answer(str(n), arm, 1.0) for n in range(100) for arm in ("recompute", "turbo")]
    records += [timing(pair, arm, s) for pair in range(9) for arm, s in (("recompute", 0.4), ("turbo", 0.1))]
    records += [Rejected(run="run-1", dataset="latest", item="x", arm="turbo", reason="ran dense")]
    choice, everything, one = tables(summary(standings(section(records), "nanoqa"), iter(["a.svg"]), ""))
    assert [row[1] for row in choice.rows] == ["none: recompute", "none: recompute", "turbo"]
    assert cell(everything, "turbo", "Score") == "100.0 [96.3, 100.0]"
    assert cell(everything, "turbo", "Difference") == "0.0 [−3.7, +3.7]"
    assert cell(everything, "turbo", "Hot TTFT ratio") == "4.00x [4.00, 4.00]"
    assert cell(everything, "recompute", "p50 ms") == "400"
    assert cell(one, "turbo", "Rejected") == "1"
    assert "KL" not in everything.header  # nothing recorded it


def test_one_arm_alone() -> None:
    records = [answer(str(n), "turbo", 1.0) for n in range(3)]
    found = standings(section(records, make_run(arms=("turbo",))), "nanoqa")
    assert [standing.arm for standing in found.arms] == ["turbo"]
    assert tables(summary(found, iter([]), ""))[0].rows[0][1] == "none: recompute"
