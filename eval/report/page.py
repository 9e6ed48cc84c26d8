"""A report as one HTML file that needs nothing else: no scripts, no fonts, no addresses."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from eval.report.blocks import Document
from eval.report.charts.svg import COLOURS, RULES
from redknot.cli.printable import printable

_TEMPLATE = "page.html"


def page(document: Document) -> str:
    """The file's text. Whatever the blocks hold is escaped, and what is not printable is shown as its escape."""
    environment = Environment(
        loader=PackageLoader("eval.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # what is Markup is ours
    )
    environment.filters["figure"] = _figure
    environment.filters["kind"] = lambda block: type(block).__name__
    headings = [(number, block) for number, block in enumerate(document.blocks) if getattr(block, "level", 0) == 2]
    return environment.get_template(_TEMPLATE).render(document=document, headings=headings, plot_style=COLOURS + RULES)


def _figure(cell: str) -> tuple[str, str]:
    """A figure and its interval, which stands below it in small print."""
    value, mark, interval = cell.rpartition(" [")
    return (value, f"[{interval}") if mark and interval.endswith("]") else (cell, "")
