"""What the catalogue returns: plain values, no handles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from redknot.artifact.identity import token_bytes_hash
from redknot.artifact.reasons import MalformedFileError
from redknot.errors import StoreError


class ArtifactState(StrEnum):
    """Whether readers may be given an artifact."""

    READY = "ready"
    QUARANTINED = "quarantined"


@dataclass(frozen=True)
class ArtifactRow:
    """One artifact in the catalogue; times in seconds since the epoch, ``nbytes`` of its files."""

    artifact_id: str
    namespace: str
    model: str  # digest of the ModelIdentity
    token_hash: str
    token_count: int
    nbytes: int
    generation: int
    needs: tuple[str, ...]
    world: int
    state: ArtifactState
    created: float
    last_used: float


@dataclass(frozen=True)
class TokenRow:
    """The token ids of one artifact, for matching; the array is read only, int32 [token_count]."""

    artifact: ArtifactRow
    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True)
class QuarantineRow:
    """One section or file that failed a check."""

    artifact_id: str
    generation: int
    section: str
    file: str
    moved_to: str  # name in quarantine/, empty when it could not be moved or gc has deleted it
    reason: str
    at: float


ARTIFACT_COLUMNS = (
    "artifact_id, namespace, model, token_hash, token_count, nbytes, "
    "generation, needs, world, state, created, last_used"
)


def artifact_row(values: Sequence[object]) -> ArtifactRow:
    """Build a row from the values of ``ARTIFACT_COLUMNS``; StoreError when the record is damaged."""
    fields = list(values)
    try:
        needs = json.loads(str(fields[7]))
        if not isinstance(needs, list) or not all(isinstance(need, str) for need in needs):
            raise ValueError("needs is no list of names")
        fields[7] = tuple(needs)
        fields[9] = ArtifactState(str(fields[9]))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"the catalogue's record of artifact {str(values[0])[:12]} is damaged: {error}") from error
    return ArtifactRow(*fields)  # type: ignore[arg-type]


def token_row(artifact: ArtifactRow, ids: bytes) -> TokenRow:
    """Build a row from the stored bytes of token ids; MalformedFileError unless the artifact was made from these."""
    if len(ids) != 4 * artifact.token_count:
        raise MalformedFileError(f"{len(ids)} bytes for {artifact.token_count} token ids")
    if token_bytes_hash(ids) != artifact.token_hash:
        raise MalformedFileError(f"its {artifact.token_count} token ids do not match their hash")
    return TokenRow(artifact, np.frombuffer(ids, dtype="<i4"))
