"""`redknot report DIR...`: rebuild the report of an evaluation from its results files."""

from __future__ import annotations

import argparse
from pathlib import Path

from redknot.cli.common import plural, print_json
from redknot.cli.printable import printable
from redknot.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    text = "folders with results.jsonl or results.jsonl.gz in them or below, or such files"
    parser.add_argument("paths", type=Path, nargs="+", metavar="DIR", help=text)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write (default: the one DIR)")
    parser.add_argument("--title", help="heading of the report")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Write report.html, report.md and the plots; equal records give equal bytes."""
    try:  # the evaluation has an extra of its own, which nothing else here needs
        from eval.report.document import TITLE, figures, read_sections
        from eval.report.write import target, write_report
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the report needs the eval extra, {error.name} is missing: pip install 'redknot-mla[eval]'"
        ) from None
    folder = target(args.paths, args.out)
    found = read_sections(args.paths)
    files = write_report(found, folder, args.title or TITLE)
    if args.json:
        print_json({"files": [str(path) for path in files], "sections": figures(found)})
        return 0
    for section in found:
        answers, timings = plural(len(section.answers), "answer"), plural(len(section.timings), "timing")
        print(printable(f"{section.model}: {answers}, {timings}, {len(section.rejected)} rejected"))
    for path in files:
        print(printable(str(path)))
    return 0
