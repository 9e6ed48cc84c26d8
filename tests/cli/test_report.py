"""`redknot report`: what it writes and prints, and what it refuses."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from eval.results import RESULTS
from tests.kit.results import evaluation

ARMS = ("recompute", "rowsparse", "no-documents")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    evaluation(ARMS, contexts=4, questions=2).write(tmp_path / "results")
    return tmp_path / "results"


def test_the_report_stands_beside_its_results(redknot, results):
    ran = redknot("report", results)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines() == [
        "nano: 48 answers, 120 timings, 1 rejected",
        *(str(results / name) for name in ("report.html", "report.md", "pareto.svg")),
    ]
    assert "<title>RedKnot: what each profile costs and gives</title>" in (results / "report.html").read_text()
    before = {path.name: path.read_bytes() for path in results.iterdir()}
    assert redknot("report", results).code == 0
    assert {path.name: path.read_bytes() for path in results.iterdir()} == before


def test_json(redknot, results):
    found = redknot("report", results, "--json").json
    assert [Path(name).name for name in found["files"]] == ["report.html", "report.md", "pareto.svg"]
    (section,) = found["sections"]
    assert (section["model"], section["engine"], section["tp"], section["rejected"]) == ("nano", "embedded", 1, 1)
    arms = section["tools"]["nanoqa"]["arms"]
    assert list(arms) == ["recompute", "rowsparse", "no-documents"]
    assert arms["rowsparse"]["score"]["n"] == 16
    assert arms["rowsparse"]["hot_request_ratio"]["low"] > 1
    assert arms["recompute"]["difference"] is None


def test_several_places_need_a_target(redknot, results, tmp_path):
    packed = tmp_path / "more" / f"{RESULTS}.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress((results / RESULTS).read_bytes()))
    ran = redknot("report", results, packed.parent)
    assert (ran.code, ran.out) == (2, "")
    assert "--out" in ran.err
    ran = redknot("report", results, packed.parent, "--out", tmp_path / "here", "--title", "Two <places>")
    assert ran.code == 0
    assert "<h1>Two &lt;places&gt;</h1>" in (tmp_path / "here" / "report.html").read_text()
    assert ran.out.splitlines()[0] == "nano: 48 answers, 120 timings, 1 rejected"  # equal records are one


@pytest.mark.parametrize("broken", ["not json\n", '{"kind": "run"}\n', '{"kind": "build", "run": "a"}\n'])
def test_files_that_hold_something_else(redknot, tmp_path, broken):
    (tmp_path / RESULTS).write_text(broken)
    ran = redknot("report", tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("redknot report: error: ")
    assert f"{RESULTS}:1: no result" in ran.err
    assert ran.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [RESULTS]


def test_places_without_results(redknot, tmp_path):
    for place in (tmp_path, tmp_path / "missing"):
        ran = redknot("report", place)
        assert (ran.code, ran.err.count("\n")) == (2, 1)


def test_a_place_that_cannot_be_written(redknot, results, tmp_path):
    (tmp_path / "file").touch()
    ran = redknot("report", results, "--out", tmp_path / "file")
    assert (ran.code, ran.err.count("\n")) == (2, 1)


def test_without_the_extra(redknot, results, monkeypatch):
    for module in [name for name in sys.modules if name.startswith("eval.report")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    ran = redknot("report", results)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("redknot report: error: the report needs the eval extra")
    assert ran.err.count("\n") == 1


def test_the_package_is_the_verb(results):
    command = [sys.executable, "-m", "eval.report", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "nano: 48 answers, 120 timings, 1 rejected"


def test_making_a_report_needs_no_torch():
    code = "import sys, eval.report.results_page; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr
