"""`python -m eval.ruler`: RULER's files as published, every arm against recompute."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.arguments import add_document_tokens, add_timed_items, main, make_parser
from eval.encoder import Encoder
from eval.items import DataSet
from eval.ruler.items import datasets

FIXED = ("document_tokens",)


def parser() -> argparse.ArgumentParser:
    found = make_parser("ruler", "Answer RULER's questions in every arm, and time the arms in pairs.")
    found.add_argument("--files", type=Path, nargs="+", required=True, help="published files, .jsonl or .jsonl.gz")
    add_document_tokens(found)
    add_timed_items(found)
    return found


def sets(args: argparse.Namespace, checkpoint: Path, encoder: Encoder) -> tuple[Sequence[DataSet], Sequence[DataSet]]:
    found = datasets(args.files, encoder, args.document_tokens)
    return found, found


if __name__ == "__main__":
    sys.exit(main("ruler", parser(), sets, FIXED))
