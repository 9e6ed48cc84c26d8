"""`python -m eval.nanoqa`: fresh questions in nano's language, as many as wanted, every arm against recompute."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.arguments import main, make_parser
from eval.encoder import Encoder
from eval.items import DataSet
from eval.nanoqa.items import Draw, Generator
from redknot.errors import ConfigError
from redknot.nano.worlds import TASKS

FIXED = ("seed", "questions", "tokens", "documents")


def parser() -> argparse.ArgumentParser:
    found = make_parser("nanoqa", "Answer fresh questions about documents in every arm, and time the arms in pairs.")
    add = found.add_argument
    add("--tasks", default=",".join(TASKS), help="separated by commas (default: %(default)s)")
    add("--contexts", type=int, default=100, help="of each task; more of them go on where fewer ended (default: 100)")
    add("--questions", type=int, default=5, help="about each context (default: %(default)s)")
    add(
        "--tokens",
        type=int,
        nargs=2,
        default=[1024, 2048],
        metavar=("LO", "HI"),
        help="prompt length (default: 1024 2048)",
    )
    add("--documents", type=int, nargs=2, default=[4, 8], metavar=("LO", "HI"), help="a context (default: 4 8)")
    add("--seed", type=int, default=1, help="of contexts and of the order of pairs (default: %(default)s)")
    text = "prompt lengths that are timed, separated by commas (default: %(default)s)"
    add("--timing-lengths", default="1024,2048", help=text)
    return found


def sets(args: argparse.Namespace, checkpoint: Path, encoder: Encoder) -> tuple[Sequence[DataSet], Sequence[DataSet]]:
    for name in ("tokens", "documents"):
        low, high = getattr(args, name)
        if not 1 <= low <= high:
            raise ConfigError(f"--{name} {low} {high}: give the lowest and the highest number, from 1 on")
    if args.contexts < 1 or args.questions < 1 or args.seed < 0:
        raise ConfigError("--contexts and --questions are at least 1, and --seed at least 0")
    generator = Generator(checkpoint, encoder)
    draw = Draw(args.contexts, args.questions, tuple(args.tokens), tuple(args.documents), args.seed)
    quality = [generator.dataset(name, draw) for name in dict.fromkeys(args.tasks.split(","))]
    return quality, [generator.timing(_lengths(args.timing_lengths), args.documents[1], args.seed)]


def _lengths(text: str) -> tuple[int, ...]:
    try:
        found = tuple(dict.fromkeys(int(one) for one in text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(f"--timing-lengths {text}: give numbers of tokens, separated by commas")
    return found


if __name__ == "__main__":
    sys.exit(main("nanoqa", parser(), sets, FIXED))
