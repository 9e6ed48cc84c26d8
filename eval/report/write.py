"""Write a report's files; equal records give equal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.report.document import TITLE, document, read_sections
from eval.report.markdown import markdown
from eval.report.page import page
from eval.report.sections import Section
from redknot.errors import InputError

PAGE, TEXT = "report.html", "report.md"
_GENERATED = "written by make eval; do not edit"
_DOCS = "results.md"
_DOCS_PREFIX = "results-"


def target(paths: Sequence[Path], out: Path | None) -> Path:
    """The folder to write to: ``out``, else the one folder that was given; InputError where that is not clear."""
    if out is not None:
        return out
    if len(paths) > 1:
        raise InputError("results come from several places: say with --out where the report goes")
    return paths[0] if paths[0].is_dir() else paths[0].parent


def write_report(found: Sequence[Section], folder: Path, title: str = TITLE) -> list[Path]:
    """The page, the text and the plots; the files, in that order."""
    whole = document(found, title)
    texts = {PAGE: page(whole), TEXT: markdown(whole)}
    texts |= {plot.file: plot.picture.standalone() for plot in whole.plots()}
    return _write(folder, texts)


def write_results(paths: Sequence[Path], docs: Path) -> list[Path]:
    """The page of the documentation and its plots, without texts of arms: those are in the report."""
    whole = document(read_sections(paths), texts=False, prefix=_DOCS_PREFIX)
    texts = {_DOCS: markdown(whole, _GENERATED)}
    texts |= {plot.file: plot.picture.standalone() for plot in whole.plots()}
    return _write(docs, texts)


def _write(folder: Path, texts: dict[str, str]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return [folder / name for name in texts]
