"""`redknot profile-heads CORPUS`: measure every head's drift, choose the Global heads, write the head table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from redknot.artifact.files import write_atomic
from redknot.build.contents import Content, Contents, tokenise
from redknot.build.documents import CorpusReport, read_corpus
from redknot.build.heads import HeadSums, contexts, corpus_digest, measure_corpus, measured_heads
from redknot.cli.build_report import left_out, warnings
from redknot.cli.common import add_model, add_verify_weights, model_path, plural, print_json, settings, table
from redknot.errors import ConfigError, InputError
from redknot.model.checkpoint import load_model
from redknot.model.geometry import Geometry, load_geometry
from redknot.model.heads import HeadCorpus, MeasuredHeads
from redknot.model.tokenizer import load_tokenizer
from redknot.runtime.identity import model_identity
from redknot.runtime.model import Model

EXIT_PROBLEMS = 1
_DTYPE = torch.float32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("corpus", type=Path, help="folder (searched recursively) or file: .txt, .md, .jsonl, .jsonl.gz")
    add_model(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the head table here, for profiles to name")
    parser.add_argument("--limit", type=int, metavar="N", help="documents to measure, the first ones (default: all)")
    text = "tokens of other documents in front of each, whole ones (default: %(default)s)"
    parser.add_argument("--context", type=int, default=2048, metavar="TOKENS", help=text)
    text = "Global heads in each output group (default: %(default)s)"
    parser.add_argument("--per-group", type=int, default=1, metavar="K", help=text)
    text = "of the choice of the documents in front (default: %(default)s)"
    parser.add_argument("--seed", type=int, default=0, help=text)
    add_verify_weights(parser)
    parser.add_argument("--json", action="store_true", help="print the head table's file on stdout")


def run(args: argparse.Namespace) -> int:
    """Measure and choose; 1 when some document could not be read."""
    configured, checkpoint = settings(), model_path(args.model)
    geometry = load_geometry(checkpoint)
    _check(args, geometry)
    report = CorpusReport()
    documents = read_corpus(args.corpus, report)
    contents = tokenise(documents, load_tokenizer(checkpoint, geometry), geometry.max_positions, report)
    print(*warnings(report, "profile-heads"), sep="", end="", file=sys.stderr)
    most = geometry.max_positions - (geometry.bos_token_id is not None)
    in_front = contexts(contents.all, args.context, most, args.seed)[: args.limit]
    if not any(in_front):
        raise InputError(
            f"{args.corpus} holds no two documents that fit one behind the other "
            f"({plural(len(contents.all), 'document')}; {left_out(report)})"
        )
    identity = model_identity(checkpoint, geometry, _DTYPE, configured.cache_dir, verify_weights=args.verify_weights)
    model = Model(*load_model(checkpoint, _DTYPE))
    sums = _measure(args, model, contents.all, in_front)
    found = measured_heads(model, identity, sums, _corpus(args, contents, in_front, sums), args.per_group)
    if args.out is not None:
        write_atomic(args.out, (found.model_dump_json(indent=1) + "\n").encode())
    print_json(found.model_dump(mode="json")) if args.json else print(_text(found, geometry, args.out))
    return EXIT_PROBLEMS if report.problems else 0


def _check(args: argparse.Namespace, geometry: Geometry) -> None:
    """ConfigError for what would only show when all is measured."""
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit {args.limit}: at least one document is measured")
    if args.context < 1 or args.seed < 0:
        raise ConfigError("--context is at least 1 and --seed at least 0")
    if not 1 <= args.per_group < geometry.heads_per_group:
        most = geometry.heads_per_group - 1
        raise ConfigError(f"--per-group {args.per_group}: from 1 to {most}, so that a head stays Local")
    if args.out is not None and (args.out.is_dir() or not args.out.parent.is_dir()):
        raise ConfigError(f"--out {args.out}: give a file in a folder that is there")


def _measure(
    args: argparse.Namespace, model: Model, contents: Sequence[Content], in_front: Sequence[tuple[int, ...]]
) -> HeadSums:
    """Measure under a progress bar in tokens, for people only."""
    disable = True if args.json else None  # None: unless stderr is a terminal
    total = sum(map(len, contents[: len(in_front)]))
    with tqdm(total=total, unit="tok", unit_scale=True, disable=disable, file=sys.stderr, leave=False) as bar:

        def on_done(content: Content) -> None:
            bar.update(len(content))

        return measure_corpus(model, contents, in_front, on_done)


def _corpus(
    args: argparse.Namespace, contents: Contents, in_front: Sequence[tuple[int, ...]], sums: HeadSums
) -> HeadCorpus:
    return HeadCorpus(
        digest=corpus_digest(contents.all),
        documents=len(contents.all),
        tokens=contents.tokens,
        measured=sum(map(bool, in_front)),
        rows=sums.rows,
        context=args.context,
        seed=args.seed,
    )


def _text(found: MeasuredHeads, geometry: Geometry, out: Path | None) -> str:
    """What was chosen, layer by layer, and what drift it leaves."""
    corpus, heads = found.corpus, found.table
    lines = [f"{corpus.measured} of {plural(corpus.documents, 'document')} measured, {corpus.rows:,} rows"]
    rows = []
    for number, (chosen, drifts) in enumerate(zip(heads.positions, found.drifts, strict=True)):
        picked = " ".join(",".join(map(str, group)) for group in chosen)
        largest = " ".join(f"{max(group):.4f}" for group in drifts)
        mean = sum(map(sum, drifts)) / geometry.num_heads
        rows.append([number, geometry.kinds[number].name, picked, largest, f"{mean:.4f}"])
    lines.append(table(["LAYER", "KIND", "GLOBAL", "LARGEST", "MEAN"], rows, right=(0,)))
    first = ",".join(map(str, range(heads.per_group)))
    lines.append(f"mean drift of the Local heads: {found.remaining.fixed:.5f} where {first} of each group is Global, ")
    lines[-1] += f"{found.remaining.table:.5f} under this table"
    lines.append(f"head table: {out}" if out is not None else "--out FILE keeps it as a head table that profiles name")
    return "\n".join(lines)
