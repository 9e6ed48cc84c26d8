"""The documents an engine knows: the store's catalogue as a token index, and certified artifacts behind it.

Whatever is wrong with the store or an artifact ends as a :class:`Refused` with its reason: the request then runs
dense. Nothing here raises to the caller of a request.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from redknot.artifact.certificate import Expected, validate
from redknot.artifact.identity import ModelIdentity, differences
from redknot.artifact.loaded import LoadedArtifact
from redknot.artifact.needs import WINDOW_TAIL, stored_windows
from redknot.artifact.reasons import request_reason
from redknot.artifact.rows import TokenRow
from redknot.artifact.schema import parse_section
from redknot.artifact.sections import read_specs
from redknot.artifact.store import ArtifactStore
from redknot.comm.shard import Shard
from redknot.errors import RequestReason, StoreError
from redknot.model.geometry import Geometry
from redknot.plan.planner import Known
from redknot.plan.rows import KnownRun
from redknot.plan.token_index import TokenIndex
from redknot.plan.windows import Rebuild, checkpoint_before, window_plan


class Refused(Exception):
    """Reuse is off for this request; carries the reason and one line of detail."""

    def __init__(self, reason: RequestReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass
class Library:
    """Known documents of one model identity, in the namespaces that a request may see: its own first."""

    store: ArtifactStore
    identity: ModelIdentity
    geometry: Geometry
    namespaces: tuple[str, ...]
    needs: tuple[str, ...]
    shard: Shard
    index: TokenIndex = field(init=False)
    known: dict[str, Known] = field(default_factory=dict)  # what the planner may ask about
    _rows: dict[str, TokenRow] = field(default_factory=dict)
    _revision: object = None

    def __post_init__(self) -> None:
        """Start with an empty index; the first request fills it."""
        self.index = TokenIndex(self.geometry.block_length)

    def refresh(self) -> None:
        """Bring the index up to date with the catalogue; raises Refused when the store cannot be read.

        An artifact whose token ids are damaged is not in it; the store has counted, logged and quarantined it.
        """
        try:
            revision = self.store.revision
            if revision == self._revision:
                return
            world, known = self.shard.world, self._rows
            fresh = {
                row.artifact.artifact_id: row
                for namespace in self.namespaces
                for row in self.store.tokens(namespace, self.identity, needs=self.needs, world=world, known=known)
            }
            for gone in self._rows.keys() - fresh.keys():
                self.index.remove(gone)
            for artifact_id in fresh.keys() - self._rows.keys():
                self.index.add(artifact_id, fresh[artifact_id].token_ids)
            self._rows, self._revision = fresh, revision
            # Once per revision: every request asks, and an index holds ten thousand documents and more.
            self.known = {key: Known(len(row.token_ids), frozenset(row.artifact.needs)) for key, row in fresh.items()}
            if not fresh:
                self._explain_empty()
        except StoreError as error:
            raise Refused(RequestReason.STORE_UNAVAILABLE, str(error)) from error

    def _explain_empty(self) -> None:
        """Name what differs when every artifact of the namespaces belongs to another model."""
        others = [other for namespace in self.namespaces for other in self.store.identities(namespace)]
        if not others:
            return
        fields = min((differences(self.identity, other) for other in others), key=len)
        if not fields:
            return
        self._revision = None  # look again next time
        geometry = any(name.startswith("geometry.") for name in fields)
        reason = RequestReason.GEOMETRY_MISMATCH if geometry else RequestReason.IDENTITY_MISMATCH
        raise Refused(reason, f"the store's artifacts belong to another model: {', '.join(fields)} differ")

    def owns(self, artifact_id: str) -> bool:
        """Whether these namespaces have such an artifact, usable or not; what others have is never looked at.

        Raises Refused when the store cannot be read.
        """
        try:
            if artifact_id in self._rows:
                return True
            return any(self.store.catalogue.row(artifact_id, namespace) for namespace in self.namespaces)
        except StoreError as error:
            raise Refused(RequestReason.STORE_UNAVAILABLE, str(error)) from error

    def certified(self, artifact_id: str, stops: Collection[int]) -> tuple[LoadedArtifact, tuple[str, ...]]:
        """An artifact whose certificate holds, and the sections that this rank reads of it, none of them read yet.

        ``stops`` are the document positions behind which its runs end. Raises Refused with the reason.
        """
        row = self._rows[artifact_id]
        try:
            artifact = self.store.load(artifact_id, row.artifact.namespace)
        except StoreError as error:
            raise Refused(request_reason(error), str(error)) from error
        world = self.shard.world
        held = artifact.certificate.needs
        begins = {checkpoint_before(self.geometry, stored_windows(held), stop) for stop in stops}
        specs = read_specs(self.geometry, len(row.token_ids), self.needs, held, world, begins)
        expected = Expected(
            namespace=row.artifact.namespace,
            model=self.identity,
            token_hash=row.artifact.token_hash,  # the index holds tokens that match it
            needs=self.needs,
            world=world if any(need.startswith("zl:") for need in self.needs) else artifact.certificate.world,
            generation=row.artifact.generation,
            sections=dict(specs),
        )
        refusal = validate(artifact.certificate, expected)
        if refusal is not None:
            raise Refused(refusal.reason, refusal.message)
        return artifact, tuple(name for name in specs if parse_section(name).rank in (None, self.shard.rank))

    def rebuild(self, run: KnownRun) -> Rebuild | None:
        """How the windows at a run's end are had; None where its artifact keeps them, or the profile reads none."""
        row = self._rows[run.artifact_id]
        windows = stored_windows(row.artifact.needs)
        if WINDOW_TAIL not in self.needs or not windows.rebuilt:
            return None
        plan = window_plan(self.geometry, windows, run.doc_start + run.length)
        return Rebuild(plan, torch.tensor(row.token_ids, dtype=torch.int64))
