"""From matches to a plan: which known runs are read from artifacts, and why the other documents are new text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redknot.errors import DocumentReason
from redknot.model.geometry import Geometry
from redknot.model.profile import Profile
from redknot.plan.match import Match
from redknot.plan.rows import KnownRun, boundary_rows


@dataclass(frozen=True)
class Known:
    """What the planner must know of an artifact: its document's length and what it was built to serve."""

    tokens: int
    needs: frozenset[str]


@dataclass(frozen=True)
class PlannedDocument:
    """One document of the request; ``reason`` None means that its rows may be reused."""

    artifact_id: str | None
    start: int
    length: int
    reason: DocumentReason | None


@dataclass(frozen=True)
class Plan:
    """Known runs in request order, and every document with its fate."""

    total: int
    runs: tuple[KnownRun, ...]
    documents: tuple[PlannedDocument, ...]


def make_plan(
    total: int,
    matches: Sequence[Match],
    spans: Sequence[tuple[int, int]],
    known: Mapping[str, Known],
    profile: Profile,
    geometry: Geometry,
) -> Plan:
    """Decide each match; ``spans`` are the client's documents, so that one without a match is reported too.

    The break-even rule is exact here: a run whose rows would all run again saves nothing and becomes new text.
    """
    runs, documents = [], []
    for match in sorted(matches, key=lambda match: match.start):
        run = KnownRun(match.artifact_id, match.start, match.doc_start, match.length, known[match.artifact_id].tokens)
        reason = _refusal(run, known[match.artifact_id], profile, geometry)
        if reason is None:
            runs.append(run)
        documents.append(PlannedDocument(match.artifact_id, match.start, match.length, reason))
    for start, end in spans:
        if not any(match.start < end and match.end > start for match in matches):
            short = end - start < geometry.block_length
            reason = DocumentReason.TOO_SHORT if short else DocumentReason.NO_MATCH
            documents.append(PlannedDocument(None, start, end - start, reason))
    documents.sort(key=lambda document: document.start)
    return Plan(total, tuple(runs), tuple(documents))


def _refusal(run: KnownRun, known: Known, profile: Profile, geometry: Geometry) -> DocumentReason | None:
    needs = profile.needs()
    if run.length < geometry.block_length:
        return DocumentReason.TOO_SHORT
    if not set(needs) <= known.needs:
        return DocumentReason.NOT_BUILT
    if "window_tail" in needs and not run.whole:
        # The rows behind the run would read window latents that this profile's artifacts do not keep.
        return DocumentReason.NOT_BUILT
    if bool(boundary_rows(run, profile, geometry.window, geometry.csa_ratio).all()):
        return DocumentReason.NOT_WORTH_IT
    return None
