"""Sections made of a few records, and a look at what a page or a text consists of."""

from __future__ import annotations

from collections.abc import Iterable
from html.parser import HTMLParser
from typing import Any

from eval.report.blocks import Block, Fold, Table
from eval.report.sections import Section, sections
from eval.results import Answer, Run, Timing
from tests.kit.results import make_run

_VOID = {"meta", "br", "img", "link", "input", "hr", "line", "circle", "rect", "polyline"}  # of SVG those that we close


def section(records: Iterable[Any], run: Run | None = None) -> Section:
    """One run with these records."""
    (found,) = sections([(run or make_run(), list(records))])
    return found


def answer(item: str, arm: str, score: float, **other: Any) -> Answer:
    facts: dict[str, Any] = {
        "run": "run-1",
        "dataset": "latest",
        "cluster": item,
        "prompt_tokens": 100,
        "prompt_sha256": f"{item}{' alone' if arm == 'no-documents' else ''}",
        "max_new_tokens": 8,
        "cut": False,
        "text": f"text {score}",
        "references": ("wanted",),
        "report": {},
    }
    return Answer(item=item, arm=arm, score=score, **(facts | other))


def timing(pair: int, arm: str, request: float, **other: Any) -> Timing:
    facts: dict[str, Any] = {
        "run": "run-1",
        "dataset": "latest",
        "item": "one",
        "warmup": False,
        "position": 0,
        "state": "hot",
        "prompt_tokens": 1000,
        "prompt_sha256": "same",
        "ttft_forward_s": request / 2,
        "report": {},
    }
    return Timing(pair=pair, arm=arm, ttft_request_s=request, **(facts | other))


def tables(blocks: Iterable[Block]) -> list[Table]:
    """All tables, those in folds too."""
    found = []
    for block in blocks:
        if isinstance(block, Table):
            found.append(block)
        elif isinstance(block, Fold):
            found += tables(block.blocks)
    return found


def cell(of: Table, row: str, column: str) -> str:
    """The cell of the first row that starts with, or holds as its second cell, this text."""
    (line,) = [cells for cells in of.rows if row in cells[: of.left or 1]][:1]
    return line[of.header.index(column)]


class Outline(HTMLParser):
    """Reads a page: tags that do not close, addresses it names, its visible text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in _VOID or (tag == "circle" or tag == "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text.append(data)
