"""``redknot ask``: one question over documents, answered by reuse, by recomputation, or by both side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redknot.build.documents import read_text
from redknot.cli.common import (
    DEFAULT_NAMESPACE,
    DEFAULT_PROFILE,
    SHORT_ID,
    add_model,
    add_store,
    model_path,
    print_json,
    settings,
    table,
)
from redknot.cli.printable import printable
from redknot.model.profile import DENSE
from redknot.runtime.engine import Engine, Result
from redknot.runtime.report import DocumentReport

ARMS = {"reuse": "auto", "recompute": "off"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_model(parser)
    add_store(parser)
    parser.add_argument("--profile", default=DEFAULT_PROFILE, help="profile name or JSON file (default: %(default)s)")
    text = "whose documents may be reused (default: %(default)s)"
    parser.add_argument("--namespace", default=DEFAULT_NAMESPACE, help=text)
    parser.add_argument("--doc", action="append", default=[], metavar="FILE", help="a document; repeat, in order")
    parser.add_argument("--question", required=True, help="the text behind the documents")
    parser.add_argument("--arm", choices=[*ARMS, "both"], default="both", help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--require-reuse", action="store_true", help="fail instead of running dense")


def run(args: argparse.Namespace) -> int:
    """Answer and print; 0 unless the input is bad."""
    settings()
    segments = [*(read_text(Path(name)) for name in args.doc), args.question]
    modes = dict(ARMS, reuse="required") if args.require_reuse else ARMS
    arms = list(ARMS) if args.arm == "both" else [args.arm]
    with Engine(model_path(args.model), args.store, args.profile, namespace=args.namespace) as engine:
        # One unmeasured pass per arm: the first touches cold files and makes what later requests find made.
        for arm in arms:
            engine.generate(segments=segments, reuse=modes[arm], max_new_tokens=1)
        results = {
            arm: engine.generate(segments=segments, reuse=modes[arm], max_new_tokens=args.max_new_tokens)
            for arm in arms
        }
    ratio = _ratio(results)
    if args.json:
        body: dict[str, Any] = {arm: {"answer": r.text, **r.report.to_dict()} for arm, r in results.items()}
        print_json({**body, "ttft_request_ratio": ratio})
        return 0
    for arm, result in results.items():
        print(printable(_line(arm, result)))
    if "reuse" in results and results["reuse"].report.documents:
        print(_documents(results["reuse"].report.documents))
    if ratio is not None:
        print(f"TTFT ratio (request, recompute / reuse): {ratio:.2f}")
    return 0


def _documents(documents: Sequence[DocumentReport]) -> str:
    """What became of each document: tokens found of those that its artifact has, rows read and rows run."""
    rows = [
        (
            found.start,
            found.length,
            "-" if found.artifact_tokens is None else f"{found.matched}/{found.artifact_tokens}",
            found.reused,
            found.recomputed,
            found.artifact_id[:SHORT_ID] if found.artifact_id is not None else "-",
            found.reason or "",
        )
        for found in documents
    ]
    return table(("AT", "TOKENS", "MATCHED", "REUSED", "RUN", "ARTIFACT", "NEW TEXT BECAUSE"), rows, right=range(5))


def _ratio(results: dict[str, Result]) -> float | None:
    """Recompute TTFT over reuse TTFT; None unless both ran and the reuse arm ran otherwise than recompute does."""
    if len(results) < 2 or (results["reuse"].report.arm == DENSE and not results["reuse"].report.cached_tokens):
        return None
    return results["recompute"].report.ttft_request_s / results["reuse"].report.ttft_request_s


def _line(arm: str, result: Result) -> str:
    report = result.report
    why = f" dense: {report.reason} ({report.detail})" if report.reason is not None and arm == "reuse" else ""
    reused = f"{report.reused_tokens}/{report.prompt_tokens} tokens reused"
    reused += f", {report.cached_tokens} cached" if report.cached_tokens else ""
    times = f"TTFT {report.ttft_request_s * 1000:.1f} ms (forward {report.ttft_forward_s * 1000:.1f})"
    ledgers = report.ledgers
    saved = f"row-layers saved {ledgers.token_rows.share:.1%}, FLOPs saved {ledgers.arithmetic.share:.1%}"
    bounds = f" ({report.bounds})" if report.bounds is not None else ""
    return f"{arm:<9} {result.text.strip()!r}  {times}  {reused}  {saved}{bounds}{why}"
