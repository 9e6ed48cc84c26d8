"""`python -m eval.report` is `redknot report`."""

from __future__ import annotations

import sys

from redknot.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["report", *sys.argv[1:]]))
