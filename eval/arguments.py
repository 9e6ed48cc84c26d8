"""What the tools' command lines share: arguments, the checks of them, and running what they ask for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.arms import find_arms
from eval.encoder import Encoder
from eval.engines.opening import EMBEDDED, parse_engine
from eval.harness import run
from eval.items import DataSet
from eval.plan import Plan
from eval.provenance import make_run
from eval.recorder import Recorder
from eval.sizes import Size, sizes
from eval.summary import as_text, summary
from eval.timing import MIN_PAIRS, MIN_WARMUP, Pairs
from eval.workers import Opening
from redknot.cli.common import human_bytes, plural, print_json, settings, table
from redknot.cli.printable import printable
from redknot.errors import ConfigError, RedKnotError
from redknot.model.location import find_checkpoint

EXIT_REJECTED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130
QUALITY, TIMING = "quality", "timing"
Sets = Callable[[argparse.Namespace, Path, Encoder], tuple[Sequence[DataSet], Sequence[DataSet]]]


def base_parser(tool: str, description: str) -> argparse.ArgumentParser:
    """The arguments of all tools that ask a server or an engine."""
    parser = argparse.ArgumentParser(prog=f"python -m eval.{tool}", description=description, allow_abbrev=False)
    add = parser.add_argument
    add("--model", default="nano", help="folder of a DeepSeek-V4 checkpoint (default: %(default)s, which comes along)")
    add(
        "--out", type=Path, required=True, help="folder of results.jsonl; what it has of the same run is not done again"
    )
    add("--store", type=Path, help="artifact store (default: store, in --out)")
    text = "profiles by name or file, separated by commas; recompute is always one (default: %(default)s)"
    add("--arms", default="rowsparse,turbo", help=text)
    add("--tp", type=at_least(1), default=1, help="tensor-parallel ranks of started servers (default: %(default)s)")
    add("--dry-run", action="store_true", help="say what a run from nothing would do, and write nothing")
    add("--json", action="store_true", help="print one JSON document on stdout")
    return parser


def make_parser(tool: str, description: str) -> argparse.ArgumentParser:
    """The arguments of all tools that ask questions."""
    parser = base_parser(tool, description)
    add = parser.add_argument
    add("--engine", default=EMBEDDED, metavar="embedded|sglang[=URL]", help="what answers (default: %(default)s)")
    add("--limit", type=at_least(1), help="items of each data set, the first ones (default: all)")
    add("--only", choices=(QUALITY, TIMING), help="one of the two (default: both)")
    add("--pairs", type=at_least(MIN_PAIRS), default=MIN_PAIRS, help="measured pairs an arm (default: %(default)s)")
    add("--warmup", type=at_least(MIN_WARMUP), default=MIN_WARMUP, help="pairs before them (default: %(default)s)")
    add(
        "--workers",
        type=at_least(1),
        default=1,
        help="processes that answer and share the cores; times are taken by one",
    )
    return parser


def add_timed_items(parser: argparse.ArgumentParser) -> None:
    """--timed-items, of data sets that are files."""
    text = "items of each data set that are timed, the first ones with documents (default: %(default)s)"
    parser.add_argument("--timed-items", type=at_least(1), default=2, help=text)


def add_document_tokens(parser: argparse.ArgumentParser) -> None:
    """--document-tokens, of contexts without documents of their own."""
    text = "tokens of the documents into which contexts without markers are split (default: %(default)s)"
    parser.add_argument("--document-tokens", type=at_least(1), default=512, help=text)


def main(
    tool: str, parser: argparse.ArgumentParser, sets: Sets, fixed: Sequence[str], argv: Sequence[str] | None = None
) -> int:
    """Run a tool: 0 done, 1 done but something was rejected, 2 refused, 130 interrupted.

    ``sets`` makes the data sets of quality and of timing; ``fixed`` names the options that its results depend on.
    """
    return guarded(parser, lambda args: _run(tool, args, sets, fixed), argv)


def guarded(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], argv: Sequence[str] | None = None
) -> int:
    """Parse and run; what cannot be done is one line and EXIT_REFUSED."""
    args = parser.parse_args(argv)
    try:
        return run(args)
    except RedKnotError as error:
        print(f"{parser.prog}: error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return EXIT_REFUSED
    except OSError as error:
        where = f" {printable(str(error.filename))}:" if error.filename else ""
        print(f"{parser.prog}: error:{where} {printable(error.strerror or str(error))}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; the same command goes on from there", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(tool: str, args: argparse.Namespace, sets: Sets, fixed: Sequence[str]) -> int:
    settings()
    plan = _plan(args, sets)
    if args.dry_run:
        _print_sizes(args, sizes(plan), plan)
        return 0
    opening = plan.opening
    options = {name: plain(value) for name, value in vars(args).items() if name not in ("json", "dry_run")}
    engine, _ = parse_engine(args.engine)
    found = make_run(tool, opening.checkpoint, opening.arms, options, engine=engine, tp=args.tp)
    recorder = Recorder(args.out, found, fixed)
    try:
        run(plan, recorder)
    finally:
        recorder.close()
    lines = summary(recorder.records, tool)
    rejected = sum(line.rejected for line in lines)
    if args.json:
        print_json({"results": str(recorder.path), "rejected": rejected, "arms": [asdict(line) for line in lines]})
    else:
        print(as_text(lines))
        print(recorder.path)
    if rejected:
        print(f"{plural(rejected, 'result')} rejected; {recorder.path} has the reasons", file=sys.stderr)
    return EXIT_REJECTED if rejected else 0


def named_checkpoint(given: str) -> Path:
    """The folder of --model; ConfigError without one."""
    checkpoint = find_checkpoint(given)
    if checkpoint is None:
        raise ConfigError(f"--model {given}: no such folder; nothing is downloaded")
    return checkpoint


def _plan(args: argparse.Namespace, sets: Sets) -> Plan:
    checkpoint = named_checkpoint(args.model)
    engine, _ = parse_engine(args.engine)
    if args.workers > 1 and engine != EMBEDDED:
        raise ConfigError(f"--workers {args.workers}: a server answers one request after the other here; leave it at 1")
    arms = find_arms(name for name in args.arms.split(",") if name)
    encoder = Encoder.load(checkpoint, chat=not getattr(args, "no_chat", False))
    quality, timing = sets(args, checkpoint, encoder)
    store = args.store if args.store is not None else args.out / "store"
    plan = Plan(
        opening=Opening(args.engine, checkpoint, store, arms, args.tp),
        encoder=encoder,
        quality=() if args.only == TIMING else tuple(quality),
        timing=() if args.only == QUALITY or len(arms) == 1 else tuple(timing),
        pairs=Pairs(args.warmup, args.pairs, getattr(args, "seed", 0)),
        limit=args.limit,
        timed_items=getattr(args, "timed_items", None),
        workers=args.workers,
    )
    plan.targets  # noqa: B018  refuses an arm that does not fit the model before anything runs
    return plan


def _print_sizes(args: argparse.Namespace, found: Sequence[Size], plan: Plan) -> None:
    if args.json:
        print_json({"arms": list(plan.arms), "data_sets": [asdict(size) for size in found]})
        return
    header = ("DATA SET", "WHAT", "ITEMS", "TOKENS", "LONGEST", "CUT", "DOCUMENTS", "ARTIFACTS", "REQUESTS")
    rows = [
        (
            one.dataset,
            one.what,
            one.items,
            one.tokens,
            one.longest,
            one.cut,
            one.documents,
            human_bytes(one.nbytes),
            one.requests,
        )
        for one in found
    ]
    print(table(header, rows, right=range(2, 9)))
    print(f"arms: {', '.join(plan.arms)}")
    requests, nbytes = sum(one.requests for one in found), sum(one.nbytes for one in found)
    print(f"{plural(requests, 'request')}, {human_bytes(nbytes)} of artifacts in {plan.opening.store}")


def plain(value: Any) -> Any:
    """A value of the command line as JSON has it."""
    if isinstance(value, Path):
        return str(value)
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def at_least(least: int) -> Callable[[str], int]:
    """A type of arguments: whole numbers from ``least`` on."""

    def whole(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    whole.__name__ = "whole number"
    return whole
