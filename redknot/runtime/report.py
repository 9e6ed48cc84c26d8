"""What every response says about itself: what was reused, what ran, why, and how long it took."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from redknot.errors import DocumentReason, RequestReason
from redknot.latents.workspace import Held
from redknot.plan.planner import Plan
from redknot.plan.rows import Rows
from redknot.runtime.counters import Counters
from redknot.runtime.ledger import Bounds, Ledgers


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
    reason: DocumentReason | None
    matched: int  # tokens found equal to the artifact's document, 0 without one
    artifact_tokens: int | None  # of that whole document


@dataclass(frozen=True)
class Report:
    """One request. Counters were written by the code that did the work; the prefill alone, decode not included."""

    arm: str  # "reuse" or "dense"
    profile: str
    profile_digest: str
    reason: RequestReason | None  # why the request ran dense; None when it reused
    detail: str  # one line for people, e.g. the differing identity fields
    prompt_tokens: int
    reused_tokens: int
    certified: int  # artifacts whose certificates were validated for this request; a refused one is the reason
    documents: tuple[DocumentReport, ...]
    counters: Counters
    ledgers: Ledgers
    bounds: Bounds | None  # what the rows that ran allow to save; None of a dense request, which skipped nothing
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


def document_reports(plan: Plan | None, rows: Rows | None) -> tuple[DocumentReport, ...]:
    """Each document of a plan with the rows that did not run and those that did; without ``rows`` all of them ran."""
    out = []
    for document in plan.documents if plan is not None else ():
        running = document.length
        if rows is not None:
            running = int(rows.running[document.start : document.start + document.length].sum())
        out.append(
            DocumentReport(
                document.artifact_id,
                document.start,
                document.length,
                document.length - running,
                running,
                document.reason,
                document.matched,
                document.artifact_tokens,
            )
        )
    return tuple(out)
