"""The page and the text: whole, self-contained, the same for the same records, and safe whatever the records hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from eval.report import document as documents
from eval.report.blocks import Document, Fold, Heading, Paragraph, SideBySide, table
from eval.report.document import document, read_sections
from eval.report.markdown import markdown
from eval.report.page import page
from eval.report.results_page import main as results_page
from eval.report.sections import sections
from eval.report.write import target, write_report, write_results
from eval.results import Rejected
from redknot.errors import InputError
from tests.kit.report import Outline, answer, section, timing
from tests.kit.results import MODEL, evaluation, make_run

HOSTILE = [
    "<script>alert(1)</script>",
    "</td></table><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    '" onmouseover="alert(1)',
    "a | b\n\n# heading\n| c | `d` <!-- ![x](http://evil.example/x.png) [y](javascript:alert(1))",
    "\x00\x1b[2J\r\n\x07",
    "\u202eevil\u2066\u200f",
    "שלום مرحبا",
    "&amp; &#60;",
    "]]> --> ' \\",
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    evaluation(contexts=6, questions=2).write(folder)
    return folder


@pytest.fixture(scope="module")
def files(written: Path) -> dict[str, str]:
    paths = write_report(read_sections([written]), written)
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def test_what_is_written(files: dict[str, str]) -> None:
    assert list(files) == ["report.html", "report.md", "pareto.svg"]
    assert "![nanoqa: score against speed-up of the first token, every arm](pareto.svg)" in files["report.md"]


def test_the_page_is_whole_and_needs_nothing_else(files: dict[str, str]) -> None:
    outline = Outline(files["report.html"])
    assert (outline.open, outline.wrong) == ([], [])
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(outline.tags)
    assert [value for name, value in outline.attributes if name == "href" and not value.startswith("#")] == []
    assert not {name for name, _ in outline.attributes if name.startswith("on") or name in ("src", "action")}
    assert not re.search(r"https?://|//\w|@import|url\(|data:", files["report.html"])
    ids = [value for name, value in outline.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for name, value in outline.attributes if name == "href"} <= set(ids)


def test_every_part_is_there(files: dict[str, str]) -> None:
    text = " ".join(Outline(files["report.html"]).text)
    for part in (
        "Which profile to ship",
        "All arms, over all data sets",
        "Ablations: nanoqa",
        "Time to first token by length",
        "Four ledgers",
        "Fidelity",
        "Serving",
        "Texts side by side",
        "Rejected",
        "Provenance",
    ):
        assert part in text
        assert part in files["report.md"]
    assert files["report.html"].count("<svg") == 6


def test_equal_records_give_equal_bytes(written: Path, files: dict[str, str], tmp_path: Path) -> None:
    again = write_report(read_sections([written / "results.jsonl"]), tmp_path)
    assert {path.name: path.read_text(encoding="utf-8") for path in again} == files


def test_the_page_of_the_documentation(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results_page([str(written), "--docs", str(tmp_path / "docs")]) == 0
    text = (tmp_path / "docs" / "results.md").read_text(encoding="utf-8")
    assert text.startswith("<!-- written by make eval; do not edit -->\n\n# RedKnot")
    assert "](results-pareto.svg)" in text
    assert "Texts side by side" not in text
    assert (tmp_path / "docs" / "results-pareto.svg").read_text(encoding="utf-8").startswith("<svg xmlns=")
    assert capsys.readouterr().out.count("\n") == 2
    before = {path: path.read_bytes() for path in (tmp_path / "docs").iterdir()}
    write_results([written], tmp_path / "docs")
    assert {path: path.read_bytes() for path in (tmp_path / "docs").iterdir()} == before


def test_the_page_of_the_documentation_without_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results_page([str(tmp_path), "--docs", str(tmp_path / "docs")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("results_page: error: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "docs").exists()


def hostile_records(text: str) -> list[Any]:
    records: list[Any] = []
    for arm in ("recompute", text):
        for n in range(3):
            other: dict[str, Any] = {"dataset": text, "cluster": text, "references": (text,), "text": f"{arm}{text}"}
            records.append(answer(f"{n}{text}", arm, float(arm == "recompute"), **other))
            report = {"ledgers": {"wall_clock": {text: 1.0}}, "documents": [{"length": text, "reused": text}]}
            records.append(timing(n, arm, 1.0, dataset=text, item=text, report=report))
    return [*records, Rejected(run="run-1", dataset=text, item=text, arm=text, reason=text)]


@pytest.mark.parametrize("text", HOSTILE)
def test_records_may_hold_anything(text: str) -> None:
    run = make_run(
        command=(text,), commit=text, versions={text: text}, hardware={text: [text]}, options={text: {text: text}},
        model={"name": text, text: text}, engine=text, started=text, tool=text, arms=("recompute",),
    )  # fmt: skip
    run = run.model_copy(update={"arms": run.arms | {text: {"name": text, text: text}}, "digests": {text: text}})
    whole = document([section(hostile_records(text), run)], title=text)
    html = page(whole)
    outline = Outline(html)
    assert (outline.open, outline.wrong) == ([], [])
    assert not {"script", "img"} & set(outline.tags)
    assert not {name for name, _ in outline.attributes if name.startswith("on") or name == "src"}
    assert [value for name, value in outline.attributes if name == "href" and not value.startswith("#")] == []
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\u200e\u200f]", html)
    written = markdown(whole)
    assert not re.search(r"(?<!\\)<(?!/?(details|summary)>)", written)
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e\u2066]", written)
    assert not re.search(r"(?<!\\)!?\[[^\]]*(?<!\\)\]\((?!pareto)", written)


def test_tables_of_the_text_keep_their_columns() -> None:
    whole = Document("t", (table(("a|b", "c"), [("x | y", "1"), ("\n", "2")], marked=[0]),))
    lines = markdown(whole).splitlines()
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in lines[2:]] == [3, 3, 3, 3]
    assert lines[2:] == [r"| a\|b | c |", "|---|---:|", r"| **x \| y** | 1 |", r"| \\n | 2 |"]


def test_all_blocks_in_both() -> None:
    blocks = (
        Heading("h", 3),
        Paragraph("p", warning=True),
        Fold("f", (SideBySide("about", ("a", "left"), ("b", "right")),)),
        table(("n", "x"), [("row", "1.0 [0.5, 1.5]")]),
    )
    html, text = page(Document("t", blocks)), markdown(Document("t", blocks))
    assert "<bdi>1.0</bdi><small>[0.5, 1.5]</small>" in html
    assert '<p class="warning">p</p>' in html
    for word in ("about", "left", "right"):
        assert word in html
        assert word in text


def test_nano_proves_only_the_harness_on_published_benchmarks() -> None:
    records = [answer("1", arm, 1.0) for arm in ("recompute", "turbo")]

    def says(tool: str, name: str) -> bool:
        run = make_run(tool=tool, model=MODEL | {"name": name})
        return "harness works, nothing else" in markdown(document([section(records, run)]))

    assert says("longbench", "models/nano")
    assert says("ruler", "nano")
    assert not says("nanoqa", "nano")
    assert not says("longbench", "DeepSeek-V4-Flash")


def test_several_checkpoints_have_a_plot_each() -> None:
    runs = [make_run("a"), make_run("b", model=MODEL | {"weights": "0" * 64})]
    records = {
        run.run: [
            *(answer(str(n), arm, 1.0, run=run.run) for n in range(2) for arm in ("recompute", "turbo")),
            *(timing(n, arm, 1.0, run=run.run) for n in range(2) for arm in ("recompute", "turbo")),
        ]
        for run in runs
    }
    found = sections([(run, records[run.run]) for run in runs])
    whole = document(found)
    assert [plot.file for plot in whole.plots()] == ["pareto.svg", "pareto-2.svg"]
    assert "are never put into one table" in markdown(whole)


def test_nothing_at_all() -> None:
    for found in ([], [section([])]):
        whole = document(found)
        assert Outline(page(whole)).open == []
        assert whole.plots() == []
        assert documents.figures(found) == [] or documents.figures(found)[0]["tools"] == {}


def test_where_the_report_goes(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.touch()
    assert target([tmp_path], None) == target([file], None) == tmp_path
    assert target([file, tmp_path], tmp_path / "out") == tmp_path / "out"
    with pytest.raises(InputError, match="--out"):
        target([file, tmp_path], None)


def test_thousands_of_records() -> None:
    """Twelve arms, 250 contexts of five questions, two data sets: 30,000 answers make a page of bounded size."""
    made = evaluation(contexts=250)
    assert len(made.records) > 30_000
    html = page(document(sections([(made.run, made.records)])))
    assert len(html) < 400_000
