"""What a request would reuse, decided without running anything: match, plan, and the profile's fit to the model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from redknot.errors import RequestReason
from redknot.model.geometry import Geometry
from redknot.model.profile import Profile, misfit
from redknot.plan.match import match_spans, match_tokens
from redknot.plan.planner import Plan, Span, make_plan
from redknot.plan.rows import KnownRun
from redknot.runtime.library import Library, Refused


def plan_request(
    library: Library, profile: Profile, token_ids: Tensor, spans: Sequence[Span] | None, cached: int = 0
) -> Plan:
    """The plan of a request [n] against an up-to-date library; ``spans`` None searches all of it for documents.

    Nothing is reused of the first ``cached`` tokens.
    Raises Refused when the store cannot be read or nothing can be reused.
    """
    tokens = token_ids.numpy().astype(np.int32)
    named = {span.artifact_id for span in spans or () if span.artifact_id is not None}
    foreign = {artifact_id for artifact_id in named if not library.owns(artifact_id)}
    if spans is None:
        matches = match_tokens(tokens, library.index)
    else:
        ours = [(span.start, span.end) for span in spans if span.artifact_id not in foreign]
        matches = match_spans(tokens, ours, library.index)
    return make_plan(len(tokens), matches, spans, library.known, profile, library.geometry, foreign, cached)


def check_fit(profile: Profile, geometry: Geometry) -> None:
    """Raise Refused for a profile that this geometry cannot run.

    What no geometry could run is no profile: ``Profile`` itself refuses that.
    """
    problem = misfit(profile, geometry)
    if problem:
        raise Refused(RequestReason.UNSUPPORTED_MODEL, f"profile {profile.name} does not fit the model: {problem}")


def fingerprint(read: Sequence[tuple[KnownRun, str]]) -> int:
    """48 bits of what would be read: a sum over ranks shows whether all are the same.

    Each run comes with the digest of its artifact's certificate: the generation alone is a number that two stores, or
    two builds of one document, may share over different bytes.
    """
    return int.from_bytes(hashlib.sha256(repr(read).encode()).digest()[:6], "little")
