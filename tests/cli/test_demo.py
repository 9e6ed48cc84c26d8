"""``redknot demo``: its summary and table say what bounds each result, and only of arms that really reused."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from redknot.cli import demo
from redknot.cli.main import main
from redknot.errors import RequestReason
from redknot.latents.workspace import Held
from redknot.runtime.counters import Counters
from redknot.runtime.ledger import Bounds, Ledgers, Saving
from redknot.runtime.report import Report
from tests.kit.requests import use_cache, write_checkpoint


def row(number: int, arm: str, *, seconds: float, bound: float | None) -> demo.Row:
    """One answer; dense where there is no row bound."""
    report = Report(
        arm="dense" if bound is None else "reuse",
        profile=arm,
        profile_digest="0",
        reason=RequestReason.REUSE_OFF if bound is None else None,
        detail="",
        prompt_tokens=100,
        cached_tokens=0,
        reused_tokens=0 if bound is None else 80,
        forwarded_rows=100 if bound is None else 20,
        certified=0 if bound is None else 1,
        documents=(),
        counters=Counters(),
        ledgers=Ledgers(Saving(0, 100), Saving(0, 10), Saving(0 if bound is None else 75, 100), {}),
        bounds=None if bound is None else Bounds(bound, 0.729),
        latents=Held(0, 0, 0, 4, block_bytes=10, arena_bytes=5),
        ttft_forward_s=seconds,
        ttft_request_s=seconds,
    )
    return demo.Row(number, "q", " fox 1.", arm, "fox 1.", report)


@pytest.fixture
def rows() -> list[demo.Row]:
    found = []
    for number, bound in enumerate((3.0, 4.0, 9.0)):
        found.append(row(number, "recompute", seconds=6.0, bound=None))
        found.append(row(number, "rowsparse", seconds=2.0, bound=bound))
        found.append(row(number, "turbo", seconds=1.0, bound=None if number else 14.0))
    return found


def test_the_summary_has_the_bounds_of_arms_that_reused(rows):
    summary = demo.summarise(rows)
    assert summary["rowsparse"]["bounds"] == {"row_bound": 4.0, "head_row_ceiling": 0.729}
    assert (summary["rowsparse"]["ratio"], summary["rowsparse"]["ratio_of_flops"]) == (3.0, 4.0)
    for arm in ("recompute", "turbo"):  # turbo ran dense twice
        assert summary[arm]["bounds"] is summary[arm]["ratio"] is summary[arm]["ratio_of_flops"] is None


def test_the_table_has_the_bound_beside_every_result(rows, capsys):
    demo._show(rows, demo.summarise(rows))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-3:] == ["row", "bound", "reason"]
    assert [line.split()[1] for line in lines[1:10] if re.search(r"80/100 +\d+\.0x$", line.rstrip())] == [
        "rowsparse",
        "turbo",
        "rowsparse",
        "rowsparse",
    ]
    assert all("x" not in line.split("0/100")[1] for line in lines[1:10] if " 0/100" in line)
    assert [line for line in lines[10:] if "row bound" in line] == [
        "rowsparse  3/3 right  TTFT 2000.0 ms  3.00x faster to the first token "
        "(its FLOPs allow 4.00x; row bound 4.0x, head-row ceiling 72.9%)"
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    patch = use_cache(tmp_path_factory.mktemp("cache"))
    made = tmp_path_factory.mktemp("demo")
    write_checkpoint(made / "model")
    (made / "corpus").mkdir()
    for number, name in enumerate(("Ada", "Bob", "Cid")):
        facts = [f"The {what} of {name} North is fox {number}{index}." for index, what in enumerate(("code", "colour"))]
        filler = "Nobody remembers who painted the old gate, or why the dog sleeps beside it until noon. " * 3
        (made / "corpus" / f"{name}.txt").write_text(filler + " ".join(facts))
    yield made
    patch.undo()


def run(folder: Path, *options: str) -> int:
    places = [part for name in ("model", "corpus", "store") for part in (f"--{name}", str(folder / name))]
    return main(["demo", *places, "--out", str(folder / "out"), "--documents", "2", "--questions", "1", *options])


def is_png(path: Path) -> bool:
    data = path.read_bytes()
    return data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")


def test_json_is_one_object_with_the_bounds(folder, capsys):
    assert run(folder, "--json") in (0, 1)  # a random model answers nothing right, which is no matter of this test
    out, err = capsys.readouterr()
    body = json.loads(out)
    assert "built 3/3" in err
    for row in body["rows"]:
        bounds = row["report"]["bounds"]
        assert (bounds is None) == (row["arm"] == "recompute")
        assert body["summary"][row["arm"]]["bounds"] == bounds
    assert body["summary"]["turbo"]["bounds"]["row_bound"] > 1
    assert [json.loads(line) for line in (folder / "out" / "rows.jsonl").read_text().splitlines()] == body["rows"]
    if importlib.util.find_spec("matplotlib") is not None:
        assert is_png(folder / "out" / "demo.png")


def test_the_picture_is_written(rows, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "demo.png"
    assert demo._draw(rows, path) == path
    assert is_png(path)


@pytest.mark.parametrize("options", [("--questions", "0"), ("--documents", "0"), ("--documents", "4")])
def test_what_cannot_be_shown(folder, capsys, options):
    assert run(folder, *options) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--seed", "-1"], "--seed -1 must be 0 or more"),
        (["--out", "file/below"], "file"),
    ],
)
def test_mistakes_are_refused_before_the_work(tmp_path, monkeypatch, capsys, changes, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    corpus = Path(__file__).resolve().parents[2] / "examples" / "corpus"
    monkeypatch.setattr(demo, "_build", lambda *_: pytest.fail("it built"))
    assert main(["demo", "--corpus", str(corpus), *changes]) == 2
    assert message in capsys.readouterr().err


def test_a_corpus_without_facts_is_refused(tmp_path, capsys):
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text("Nothing is stated here.")
    assert main(["demo", "--corpus", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "states nothing that the demo can ask about" in capsys.readouterr().err
