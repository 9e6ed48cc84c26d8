"""`python -m eval.longbench`: LongBench and LongBench-E from their published files, every arm against recompute."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.arguments import add_document_tokens, add_timed_items, main, make_parser
from eval.encoder import Encoder
from eval.items import DataSet
from eval.longbench.items import dataset
from eval.longbench.tasks import task, tasks

FIXED = ("longbench_e", "max_length", "document_tokens", "no_chat")


def parser() -> argparse.ArgumentParser:
    found = make_parser("longbench", "Answer LongBench's questions in every arm, and time the arms in pairs.")
    found.add_argument(
        "--data-dir", type=Path, required=True, help="folder of the published files, .jsonl or .jsonl.gz"
    )
    found.add_argument("--datasets", help="names, separated by commas (default: all that the benchmark has)")
    found.add_argument("--longbench-e", action="store_true", help="LongBench-E: its files, and scores by length")
    text = "tokens of a prompt; the middle of longer ones is cut out, as the benchmark does (default: the model's)"
    found.add_argument("--max-length", type=int, help=text)
    found.add_argument("--no-chat", action="store_true", help="do not wrap any prompt in the model's chat form")
    add_document_tokens(found)
    add_timed_items(found)
    return found


def sets(args: argparse.Namespace, checkpoint: Path, encoder: Encoder) -> tuple[Sequence[DataSet], Sequence[DataSet]]:
    if args.datasets is not None:
        chosen = [task(name) for name in dict.fromkeys(args.datasets.split(","))]
    else:
        chosen = [one for one in tasks().values() if one.longbench_e or not args.longbench_e]
    found = [
        dataset(args.data_dir, one, args.longbench_e, encoder, args.max_length, args.document_tokens) for one in chosen
    ]
    return found, found


if __name__ == "__main__":
    sys.exit(main("longbench", parser(), sets, FIXED))
