"""A report as Markdown: tables and text; of the pictures those that are files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from eval.report.blocks import Block, Document, Fold, Heading, Paragraph, Plot, SideBySide, Table
from redknot.cli.printable import printable

_SPECIAL = re.compile(r"([\\`*_\[\]|~])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def markdown(document: Document, first: str = "") -> str:
    """The text; ``first`` is a comment on top."""
    lines = [f"<!-- {first} -->", ""] if first else []
    lines += [f"# {_plain(document.title)}", "", *_blocks(document.blocks)]
    return "\n".join(lines).rstrip() + "\n"


def _blocks(blocks: Iterable[Block]) -> Iterator[str]:
    for block in blocks:
        yield from _block(block)


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Heading):
        yield from (f"{'#' * block.level} {_plain(block.text)}", "")
    elif isinstance(block, Paragraph):
        yield from (f"**{_plain(block.text)}**" if block.warning else _plain(block.text), "")
    elif isinstance(block, Table):
        yield from (*_table(block), "")
    elif isinstance(block, Plot):
        if block.file:
            yield from (f"![{_plain(block.picture.title)}]({block.file})", "", _plain(block.caption), "")
    elif isinstance(block, Fold):
        yield from ("<details>", f"<summary>{_plain(block.title)}</summary>", "")
        yield from (*_blocks(block.blocks), "</details>", "")
    elif isinstance(block, SideBySide):
        yield from (_plain(block.about), "")
        yield from (f"- {_plain(who)}: {_plain(what)}" for who, what in (block.left, block.right))
        yield ""


def _table(of: Table) -> Iterator[str]:
    columns = len(of.header)
    yield _row(of.header)
    yield "|" + "|".join("---" if column < of.left else "---:" for column in range(columns)) + "|"
    for number, row in enumerate(of.rows):
        cells = [_plain(cell) for cell in row]
        if number in of.marked and cells[0]:
            cells[0] = f"**{cells[0]}**"
        yield "| " + " | ".join(cells) + " |"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    """Any text on one line, shown as it is: no markup, no HTML, no control characters."""
    escaped = _SPECIAL.sub(r"\\\1", printable(text))
    return "".join(_ENTITIES.get(mark, mark) for mark in escaped)
