"""From matches to a plan: which known runs are read from artifacts, and why the other documents are new text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from redknot.artifact.needs import WINDOW_TAIL, lacking, stored_windows
from redknot.errors import DocumentReason
from redknot.model.geometry import Geometry
from redknot.model.profile import Profile
from redknot.plan.rows import KnownRun, repaired_rows
from redknot.plan.search import Match
from redknot.plan.worth import saves_more_than_its_probe


@dataclass(frozen=True)
class Known:
    """What the planner must know of an artifact: its document's length and what it was built to serve."""

    tokens: int
    needs: frozenset[str]


@dataclass(frozen=True)
class Span:
    """A document that the client points out: request tokens [start, end), and which artifact it says that is."""

    start: int
    end: int
    artifact_id: str | None = None


@dataclass(frozen=True)
class PlannedDocument:
    """One document of the request; ``reason`` None means that rows of it may be reused.

    Fewer ``matched`` tokens than ``artifact_tokens`` are a document found in part: blocks at its edges, whose tokens
    merged with their neighbours, or text that differs.
    """

    artifact_id: str | None  # of its longest run
    start: int
    length: int
    reason: DocumentReason | None
    matched: int = 0  # tokens in runs of that artifact
    artifact_tokens: int | None = None  # of its whole document


@dataclass(frozen=True)
class Plan:
    """Known runs in request order, and every document with its fate."""

    total: int
    runs: tuple[KnownRun, ...]
    documents: tuple[PlannedDocument, ...]


def make_plan(
    total: int,
    matches: Sequence[Match],
    spans: Sequence[Span] | None,
    known: Mapping[str, Known],
    profile: Profile,
    geometry: Geometry,
    foreign: Collection[str] = (),
    cached: int = 0,
) -> Plan:
    """Decide each match; with ``spans`` (the client's documents) a document is a span, else it is a match.

    ``foreign`` are the artifacts that spans name and this namespace does not have: whether another one has them is
    not told, and nothing of such a span is reused. The break-even rule: a run whose rows would all run again saves
    nothing and becomes new text, and so do all runs whose rows cannot save together what it costs to rank them.
    The first ``cached`` tokens are in an exact prefix cache, which is better: no run begins in front of their end.
    """
    runs: list[KnownRun] = []
    decided: list[PlannedDocument] = []
    named = [span for span in spans or () if span.artifact_id in foreign]
    for match in sorted(matches, key=lambda match: match.start):
        if any(span.start <= match.start < span.end for span in named):
            continue
        found = known[match.artifact_id]
        run = _behind(cached, match, found.tokens, geometry.block_length)
        reason = DocumentReason.EXACT_PREFIX if run is None else _refusal(run, total, found, profile, geometry)
        if run is not None and reason is None:
            runs.append(run)
        decided.append(
            PlannedDocument(match.artifact_id, match.start, match.length, reason, match.length, found.tokens)
        )
    if not saves_more_than_its_probe(geometry, profile, runs, total):
        runs = []
        decided = [replace(one, reason=one.reason or DocumentReason.NOT_WORTH_IT) for one in decided]
    if spans is not None:
        decided = [_spanned(span, decided, span in named, geometry) for span in spans]
    return Plan(total, tuple(runs), tuple(decided))


def _behind(cached: int, match: Match, doc_length: int, block: int) -> KnownRun | None:
    """The part of a match that begins on a block boundary of its document behind ``cached`` tokens of the request."""
    skipped = -(-max(cached - match.start, 0) // block) * block
    if skipped >= match.length:
        return None
    return KnownRun(
        match.artifact_id, match.start + skipped, match.doc_start + skipped, match.length - skipped, doc_length
    )


def _spanned(span: Span, decided: Sequence[PlannedDocument], foreign: bool, geometry: Geometry) -> PlannedDocument:
    """One span as one document: reused when some run in it is, else with the reason of its longest run."""
    length = span.end - span.start
    if foreign:
        return PlannedDocument(span.artifact_id, span.start, length, DocumentReason.OTHER_NAMESPACE)
    inside = [run for run in decided if span.start <= run.start < span.end]
    if not inside:
        reason = DocumentReason.TOO_SHORT if length < geometry.block_length else DocumentReason.NO_MATCH
        return PlannedDocument(None, span.start, length, reason)
    best = max(inside, key=lambda run: (run.reason is None, run.length))
    matched = sum(run.matched for run in inside if run.artifact_id == best.artifact_id)
    return PlannedDocument(best.artifact_id, span.start, length, best.reason, matched, best.artifact_tokens)


def _refusal(run: KnownRun, total: int, known: Known, profile: Profile, geometry: Geometry) -> DocumentReason | None:
    needs = profile.needs()
    if lacking(needs, known.needs):
        return DocumentReason.NOT_BUILT
    if WINDOW_TAIL in needs and not run.whole and not stored_windows(known.needs).serve_parts:
        # The rows behind the run would read window latents that the artifact does not keep.
        return DocumentReason.NOT_BUILT
    if bool(repaired_rows(run, total, profile, geometry.window, geometry.csa_ratio).all()):
        return DocumentReason.NOT_WORTH_IT
    return None
