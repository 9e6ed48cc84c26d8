"""What `redknot build` prints, as text and as JSON."""

from __future__ import annotations

import os
from typing import Any

from redknot.build.builder import BuildResult
from redknot.build.contents import Contents
from redknot.build.documents import CorpusReport
from redknot.build.plan import BuildPlan
from redknot.cli.common import human_bytes, plural
from redknot.cli.printable import printable

_SHOWN = 20  # problems printed; --json has all


def warnings(report: CorpusReport, verb: str = "build") -> list[str]:
    """Lines for stderr: each problem, and what was left out."""
    said = f"redknot {verb}: "
    lines = [f"{said}{printable(str(problem))}\n" for problem in report.problems[:_SHOWN]]
    if len(report.problems) > _SHOWN:
        lines.append(f"{said}{plural(len(report.problems) - _SHOWN, 'more problem')}; --json lists all\n")
    if report.empty or report.ignored_files:
        lines.append(f"{said}left out {_counted(report)}\n")
    return lines


def left_out(report: CorpusReport) -> str:
    """Counts of everything that was not taken."""
    return f"{_counted(report)}, {plural(len(report.problems), 'problem')}"


def _counted(report: CorpusReport) -> str:
    return f"{plural(report.empty, 'empty document')}, {plural(report.ignored_files, 'file')} of other types"


def plan_json(plan: BuildPlan, contents: Contents, report: CorpusReport) -> dict[str, Any]:
    """What a dry run knows; a build adds to it."""
    tokens = plan.missing_tokens
    return {
        "dry_run": True,
        "store": os.fspath(plan.store),
        "namespace": plan.target.namespace,
        "needs": list(plan.target.needs),
        "windows": str(plan.target.windows) if plan.target.windows is not None else None,
        "tp_size": plan.target.world,
        "documents": contents.documents,
        "identical": contents.identical,
        "tokens": contents.tokens,
        "skipped": len(plan.present),
        "to_build": len(plan.missing),
        "tokens_to_build": tokens,
        "planned_bytes": plan.planned_bytes,
        "bytes_per_token": plan.planned_bytes / tokens if tokens else None,
        "free_bytes": plan.free_bytes,
        "empty": report.empty,
        "ignored_files": report.ignored_files,
        "problems": [{"source": problem.source, "message": problem.message} for problem in report.problems],
    }


def result_json(plan: BuildPlan, contents: Contents, report: CorpusReport, result: BuildResult) -> dict[str, Any]:
    """What a build did."""
    there = [*plan.present, *result.elsewhere]
    ids = {present.content.token_hash: (present.artifact_id, "skipped") for present in there}
    ids |= {certificate.token_hash: (certificate.artifact_id, "built") for certificate in result.certificates}
    artifacts = [
        {
            "names": list(content.names),
            "tokens": len(content),
            "artifact_id": ids[content.token_hash][0],
            "did": ids[content.token_hash][1],
        }
        for content in contents.all
    ]
    return plan_json(plan, contents, report) | {
        "dry_run": False,
        "skipped": len(there),
        "built": len(result.certificates),
        "built_tokens": result.tokens,
        "built_bytes": result.nbytes,
        "built_bytes_per_token": result.nbytes / result.tokens if result.tokens else None,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "artifacts": artifacts,
    }


def _corpus(contents: Contents) -> str:
    same = f", {contents.identical} identical to another" if contents.identical else ""
    return f"{plural(contents.documents, 'document')}{same}, {contents.tokens:,} tokens"


def _windows(plan: BuildPlan) -> str:
    kept, geometry = plan.target.windows, plan.target.geometry
    return kept.describe(geometry.block_length, geometry.window) if kept is not None else "no profile reads any"


def plan_text(plan: BuildPlan, contents: Contents) -> str:
    """A dry run for people."""
    fits = "" if plan.planned_bytes <= plan.free_bytes else ": NOT ENOUGH"
    return "\n".join(
        [
            f"corpus      {_corpus(contents)}",
            f"needs       {' '.join(plan.target.needs)}, TP size {plan.target.world}",
            f"windows     {_windows(plan)}",
            f"skipped     {len(plan.present)}/{plan.total} already in {printable(str(plan.store))}",
            f"to build    {len(plan.missing)}/{plan.total}, {plan.missing_tokens:,} tokens",
            f"size        {human_bytes(plan.planned_bytes)} ({plan.planned_bytes:,} bytes)",
            f"free space  {human_bytes(plan.free_bytes)} ({plan.free_bytes:,} bytes){fits}",
            "dry run: nothing was written",
        ]
    )


def result_text(plan: BuildPlan, contents: Contents, result: BuildResult) -> str:
    """A build for people."""
    lines = [_corpus(contents)]
    if plan.present:
        lines.append(f"skipped {len(plan.present)}/{plan.total} (resumed): there and valid")
    if result.elsewhere:
        lines.append(f"skipped {len(result.elsewhere)}/{plan.total}: another builder was faster")
    built = f"built {len(result.certificates)}/{plan.total}, {result.tokens:,} tokens, {human_bytes(result.nbytes)}"
    if result.tokens_per_second:
        built += f" in {result.seconds:.1f} s, {result.tokens_per_second:,.0f} tokens/s"
    lines.append(built)
    if result.tokens:
        planned = plan.planned_bytes / plan.missing_tokens
        lines.append(f"{result.nbytes / result.tokens:,.0f} bytes/token, {planned:,.0f} by arithmetic")
    lines.append(f"windows on disk: {_windows(plan)}")
    lines.append(
        f"store {printable(str(plan.store))}, namespace {plan.target.namespace}, serves {' '.join(plan.target.needs)}"
    )
    return "\n".join(lines)
