"""`python -m eval.report.results_page DIR... --docs docs` writes `results.md` and its plot from results files alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.report.write import write_results
from redknot.cli.printable import printable
from redknot.errors import RedKnotError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", type=Path, nargs="+", metavar="DIR", help="folders or files of results")
    parser.add_argument("--docs", type=Path, required=True, help="folder to write to")
    args = parser.parse_args(argv)
    try:
        for path in write_results(args.paths, args.docs):
            print(printable(str(path)))
    except RedKnotError as error:
        print(f"results_page: error: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
