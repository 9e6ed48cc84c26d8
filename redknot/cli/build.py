"""`redknot build CORPUS`: plan, check the space, evaluate, publish, and say what was done."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from redknot.artifact.certificate import CertificateDraft
from redknot.artifact.needs import parse_strategy
from redknot.artifact.store import ArtifactStore
from redknot.build.builder import BuildResult, build
from redknot.build.contents import Content, Contents, tokenise
from redknot.build.documents import CorpusReport, read_corpus
from redknot.build.plan import BuildPlan, is_store, plan_build, record_names
from redknot.build.target import ALL_READ, make_target
from redknot.cli.build_report import left_out, plan_json, plan_text, result_json, result_text, warnings
from redknot.cli.common import (
    DEFAULT_NAMESPACE,
    DEFAULT_PROFILE,
    add_model,
    add_store,
    add_verify_weights,
    model_path,
    print_json,
    settings,
)
from redknot.errors import InputError
from redknot.model.checkpoint import load_model
from redknot.model.geometry import load_geometry
from redknot.model.profile import SHIPPED, load_profile
from redknot.model.tokenizer import load_tokenizer
from redknot.runtime.identity import model_identity
from redknot.runtime.model import Model

EXIT_PROBLEMS = 1
_DTYPE = torch.float32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("corpus", type=Path, help="folder (searched recursively) or file: .txt, .md, .jsonl, .jsonl.gz")
    add_model(parser)
    add_store(parser)
    parser.add_argument(
        "--profile",
        action="append",
        metavar="NAME|FILE",
        help=f"what the artifacts must serve: {', '.join(SHIPPED)} or a JSON file; given several times, one artifact "
        f"serves them all (default: {DEFAULT_PROFILE})",
    )
    parser.add_argument("--tp-size", type=int, default=1, help="tensor-parallel ranks to shard for (default: 1)")
    parser.add_argument(
        "--namespace", default=DEFAULT_NAMESPACE, help="tenant that may reuse them (default: %(default)s)"
    )
    parser.add_argument(
        "--windows",
        default=str(ALL_READ),
        metavar="all|checkpoints:K|none",
        help="window rows to keep on disk: all that the profiles read, those at every K-th block boundary, or none; "
        "what is not kept is recomputed when a document is first used (default: %(default)s)",
    )
    add_verify_weights(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be built and its size, write nothing")


def run(args: argparse.Namespace) -> int:
    """Build, or with --dry-run say what would be built; 1 when some document could not be."""
    configured, checkpoint = settings(), model_path(args.model)
    geometry = load_geometry(checkpoint)
    profiles = [load_profile(name) for name in args.profile or [DEFAULT_PROFILE]]
    target = make_target(geometry, profiles, args.tp_size, args.namespace, parse_strategy(args.windows))
    tokenizer, report = load_tokenizer(checkpoint, geometry), CorpusReport()
    contents = tokenise(read_corpus(args.corpus, report), tokenizer, geometry.max_positions, report)
    if not args.json:
        print(*warnings(report), sep="", end="", file=sys.stderr)
    if not contents.all:
        first = f": {report.problems[0]}" if report.problems else ""  # whoever reads JSON has no other place for it
        raise InputError(f"{args.corpus} holds no document that can be built ({left_out(report)}){first}")

    def draft() -> CertificateDraft:
        verify = args.verify_weights
        return target.draft(model_identity(checkpoint, geometry, _DTYPE, configured.cache_dir, verify_weights=verify))

    there = draft() if is_store(args.store) else None
    with _bar(args, contents.tokens, "checking what is there", hidden=there is None) as bar:
        plan = plan_build(
            target,
            args.store,
            contents.all,
            there,
            checked=not args.dry_run,
            on_content=lambda content: _advance(bar, content),
        )
    if args.dry_run:
        print_json(plan_json(plan, contents, report)) if args.json else print(plan_text(plan, contents))
    else:
        plan.check_space()
        model = Model(*load_model(checkpoint, _DTYPE)) if plan.missing else None
        _execute(args, plan, contents, report, model, there or draft())
    return EXIT_PROBLEMS if report.problems else 0


def _execute(
    args: argparse.Namespace,
    plan: BuildPlan,
    contents: Contents,
    report: CorpusReport,
    model: Model | None,
    draft: CertificateDraft,
) -> None:
    with ArtifactStore(args.store, create=True) as store:
        store.gc()  # what a killed build left behind takes space that this one may need
        for present in plan.present:
            record_names(store, present, draft.namespace)
        result = _build(args, plan, model, store, draft) if model is not None else BuildResult()
        if args.json:
            print_json(result_json(plan, contents, report, result))
        else:
            print(result_text(plan, contents, result))


def _build(
    args: argparse.Namespace, plan: BuildPlan, model: Model, store: ArtifactStore, draft: CertificateDraft
) -> BuildResult:
    """Build what is missing under a progress bar; an interrupt first says how far it came."""
    done = len(plan.present)
    resumed = " (resumed)" if plan.present else ""
    with _bar(args, plan.missing_tokens, f"{done}/{plan.total}{resumed}") as bar:

        def on_done(content: Content) -> None:
            nonlocal done
            done += 1
            bar.set_description(f"{done}/{plan.total}{resumed}", refresh=False)
            bar.update(len(content))

        try:
            return build(model, store, draft, plan.missing, on_done, plan.target.heads)
        except KeyboardInterrupt:
            bar.close()
            print(f"stopped at {done}/{plan.total}{resumed}; the same command goes on from there", file=sys.stderr)
            raise


def _advance(bar: tqdm[Any], content: Content) -> None:
    bar.update(len(content))


def _bar(args: argparse.Namespace, tokens: int, text: str, *, hidden: bool = False) -> tqdm[Any]:
    """A progress bar in tokens on stderr: only for people, so not with --json or into a file."""
    disable = True if args.json or hidden else None  # None: unless stderr is a terminal
    return tqdm(total=tokens, unit="tok", unit_scale=True, desc=text, disable=disable, file=sys.stderr, leave=False)
