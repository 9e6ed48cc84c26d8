"""What every response says about itself: what was reused, what ran, why, and how long it took."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from redknot.errors import DocumentReason, RequestReason
from redknot.latents.workspace import Held
from redknot.model.profile import DENSE, Profile
from redknot.plan.planner import Plan
from redknot.plan.rows import Rows
from redknot.runtime.counters import Counters
from redknot.runtime.ledger import Bounds, Ledgers, bounds, ledgers
from redknot.runtime.model import Model
from redknot.runtime.progress import Request


@dataclass(frozen=True)
class DocumentReport:
    """One document of the request; ``reason`` says why it was new text, None when rows of it were reused.

    Without spans it is what was found: ``matched`` of the artifact's ``artifact_tokens``, so what is missing at its
    edges is their difference.
    """

    artifact_id: str | None
    start: int
    length: int
    reused: int  # rows read from the artifact in the middle layers
    recomputed: int
    cached: int  # rows that a prefix cache had
    reason: DocumentReason | None
    matched: int  # tokens found equal to the artifact's document, 0 without one
    artifact_tokens: int | None  # of that whole document


@dataclass(frozen=True)
class Report:
    """One request. Counters were written by the code that did the work; the prefill alone, decode not included."""

    arm: str  # of ``ARMS``: "reuse", "dense", or "fan-out", every row with fewer experts in the middle layers
    profile: str
    profile_digest: str
    reason: RequestReason | None  # why the request ran dense; None when it ran as its profile says
    detail: str  # one line for people, e.g. the differing identity fields
    prompt_tokens: int
    cached_tokens: int  # of these, at the start, what a prefix cache had
    reused_tokens: int
    forwarded_rows: int  # that ran in the middle layers: of the prompt, what is neither cached nor reused
    certified: int  # artifacts whose certificates were validated for this request; a refused one is the reason
    documents: tuple[DocumentReport, ...]
    counters: Counters
    ledgers: Ledgers
    bounds: Bounds | None  # what the rows that ran allow to save; None where none was skipped: of the other two arms
    latents: Held  # what the request held of the latent store behind its prefill: shared, copied and fresh blocks
    ttft_forward_s: float  # prefill entry to first token
    ttft_request_s: float  # call to first token: match, load, vote and probe included

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        nested = ("documents", "counters", "ledgers", "bounds", "latents")
        out = {key: value for key, value in vars(self).items() if key not in nested}
        out["documents"] = [asdict(document) for document in self.documents]
        counters = asdict(self.counters)
        del counters["cuts"]
        out["counters"] = counters
        out["ledgers"] = self.ledgers.to_dict()
        out["bounds"] = asdict(self.bounds) if self.bounds is not None else None
        shared, own = self.latents.shared_bytes, self.latents.own_bytes
        out["latents"] = asdict(self.latents) | {"shared_bytes": shared, "own_bytes": own}
        return out


def make_report(model: Model, profile: Profile, request: Request) -> Report:
    """The report of a request whose prefill has ended."""
    assert request.workspace is not None
    geometry, shard, ran, cached = model.geometry, model.group.shard, request.counters, request.cached
    rows = request.rows if request.reason is None else None  # those of a reusing prefill
    documents = document_reports(request.plan, rows, cached)
    total = len(request.token_ids)
    return Report(
        arm=profile.arm if request.reason is None else DENSE,
        profile=profile.name,
        profile_digest=profile.digest(),
        reason=request.reason,
        detail=request.detail,
        prompt_tokens=total,
        cached_tokens=cached,
        reused_tokens=sum(document.reused for document in documents),
        forwarded_rows=ran.rows.get(profile.fence_layers, 0),
        certified=request.certified,
        documents=documents,
        counters=ran,
        ledgers=ledgers(geometry, profile, total, ran, request.wall, shard, cached),
        bounds=None if rows is None else bounds(geometry, profile, rows),
        latents=request.workspace.held(),
        ttft_forward_s=request.wall["ttft_forward_s"],
        ttft_request_s=request.wall["ttft_request_s"],
    )


def document_reports(plan: Plan | None, rows: Rows | None, cached: int = 0) -> tuple[DocumentReport, ...]:
    """Each document of a plan with the rows that did not run and those that did; without ``rows`` all of them ran.

    The first ``cached`` rows of the request were in a prefix cache.
    """
    out = []
    for document in plan.documents if plan is not None else ():
        stop = document.start + document.length
        start = min(max(document.start, cached), stop)
        running = stop - start if rows is None else int(rows.running[start:stop].sum())
        out.append(
            DocumentReport(
                document.artifact_id,
                document.start,
                document.length,
                stop - start - running,
                running,
                start - document.start,
                document.reason,
                document.matched,
                document.artifact_tokens,
            )
        )
    return tuple(out)
