"""What a request may reuse: planned against the library, certified, and the same on every tensor-parallel rank.

Ranks that see the store at different moments may each be sure of another plan. They vote on what exactly they would
read before anything that only a reusing request does.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from redknot.artifact.loaded import LoadedArtifact
from redknot.comm.group import Group
from redknot.errors import RequestReason
from redknot.model.profile import Profile
from redknot.plan.windows import ends
from redknot.runtime.decision import check_fit, fingerprint, plan_request
from redknot.runtime.library import Library, Refused
from redknot.runtime.metrics import Metrics
from redknot.runtime.progress import Request
from redknot.runtime.reading import Reading
from redknot.runtime.restore import Sections, Source
from redknot.runtime.staging import CopyStream, StagedSections


@dataclass
class Agreement:
    """One profile over the documents of one library; ``library`` None is a store that cannot be used."""

    library: Library | None
    unavailable: str  # why, where there is none
    profile: Profile
    group: Group
    metrics: Metrics
    copies: CopyStream | None = None  # to the device that the model runs on; None: it runs on the CPU

    def plan(self, request: Request, cached: int = 0) -> None:
        """Find the documents of a request and decide each; Refused with the reason to run dense.

        Nothing is reused of the first ``cached`` tokens, which an exact prefix cache holds.
        """
        if not self.profile.reuses:
            raise Refused(RequestReason.REUSE_OFF, f"profile {self.profile.name} reuses nothing")
        if self.library is None:
            raise Refused(RequestReason.STORE_UNAVAILABLE, self.unavailable)
        check_fit(self.profile, self.library.geometry)
        self.library.refresh()
        started = time.perf_counter()
        request.plan = plan_request(self.library, self.profile, request.token_ids, request.spans, cached)
        request.wall["match_s"] = request.wall.get("match_s", 0.0) + time.perf_counter() - started
        if not request.plan.runs:
            raise Refused(RequestReason.NOTHING_TO_REUSE, "no document of the request can be reused")

    def sources(self, request: Request) -> list[Source]:
        """Certify what the plan reads, without reading it; Refused with the reason to run dense."""
        assert self.library is not None
        assert request.plan is not None  # ``plan`` made it
        started, library, runs = time.perf_counter(), self.library, request.plan.runs
        found: dict[str, tuple[LoadedArtifact, tuple[str, ...]]] = {}
        for artifact_id, stops in ends(runs).items():
            found[artifact_id] = self._certified(library, artifact_id, stops)
            request.certified += 1
        digests = {artifact_id: artifact.certificate.digest for artifact_id, (artifact, _) in found.items()}
        request.vote = fingerprint([(run, digests[run.artifact_id]) for run in runs])
        request.wall["certify_s"] = time.perf_counter() - started
        sections: dict[str, Sections] = {artifact_id: artifact for artifact_id, (artifact, _) in found.items()}
        if self.copies is not None:
            sections = {artifact_id: StagedSections(one, self.copies) for artifact_id, one in sections.items()}
        sources = []
        for run in runs:
            (_, names), key = found[run.artifact_id], bytes.fromhex(digests[run.artifact_id])
            sources.append(Source(run, sections[run.artifact_id], key, library.rebuild(run), names))
        return sources

    def reading(self, threads: Executor, sources: Sequence[Source]) -> Reading:
        """Begin to read and verify every section that this rank will use."""
        assert self.library is not None
        layers = self.library.geometry.num_layers
        return Reading(threads, self.group, layers, sources, self.metrics.certificate, self.copies)

    def vote(self, request: Request) -> bool:
        """Whether every rank would read the same; where not, the request has its reason. Every rank must take part."""
        total = int(self.group.all_reduce(torch.tensor([request.vote])).item())
        agreed = self.group.all_agree(request.reason is None and total == request.vote * self.group.shard.world)
        if not agreed:
            request.refuse(RequestReason.RANK_DISAGREEMENT, "the ranks could not certify the same reuse")
        return agreed

    def _certified(
        self, library: Library, artifact_id: str, stops: Collection[int]
    ) -> tuple[LoadedArtifact, tuple[str, ...]]:
        """One artifact and what is read of it, its certificate counted."""
        try:
            found = library.certified(artifact_id, stops)
        except Refused as refused:
            self.metrics.certificate(refused.reason)
            raise
        self.metrics.certificate(None)
        return found
