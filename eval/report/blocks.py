"""What a report consists of: one list of blocks, from which the page and the Markdown text are both written.

All text in blocks is plain and may hold anything; whoever writes it down escapes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.report.charts.svg import Picture
from eval.report.numbers import NOTHING


@dataclass(frozen=True)
class Heading:
    """Starts a part; level 2 to 4, level 1 is the report's title."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Running text; a warning stands out."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Table:
    """Cells of one line each; the first ``left`` columns are text, the others numbers. ``marked`` rows stand out."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1
    marked: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Plot:
    """A picture for the page; one with a file name is also a file of its own, which the Markdown text shows."""

    picture: Picture
    caption: str
    file: str = ""


@dataclass(frozen=True)
class SideBySide:
    """Two texts of one question, and what it is about."""

    about: str
    left: tuple[str, str]  # who wrote it, and what
    right: tuple[str, str]


@dataclass(frozen=True)
class Fold:
    """Details, closed at first where that can be."""

    title: str
    blocks: tuple[Block, ...]


Block = Heading | Paragraph | Table | Plot | SideBySide | Fold


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    blocks: tuple[Block, ...]

    def plots(self) -> list[Plot]:
        """The pictures that are files of their own."""
        return [block for block in self.blocks if isinstance(block, Plot) and block.file]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, marked: Sequence[int] = ()) -> Table:
    """A table from any sequences, without the columns of numbers that hold none."""
    kept = [at for at in range(len(header)) if at < left or not rows or any(row[at] != NOTHING for row in rows)]
    cells = tuple(tuple(row[at] for at in kept) for row in rows)
    return Table(tuple(header[at] for at in kept), cells, left, frozenset(marked))
