"""What an artifact belongs to: the model's identity, the token ids, and the id derived from both.

Every hash that goes into an id is SHA-256 over tagged, length-prefixed fields, so that no two different
tuples of fields have the same encoding, however their strings are permuted, split or joined.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, field_validator

from redknot.artifact.schema import LAYOUT_VERSION
from redknot.errors import InputError

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor


def tagged_hash(domain: str, fields: Iterable[tuple[str, bytes]]) -> str:
    """Return the SHA-256 (hex) of a domain and (tag, value) fields, each part preceded by its length."""
    digest = hashlib.sha256()
    parts = [domain.encode()]
    for tag, value in fields:
        parts += [tag.encode(), value]
    digest.update(len(parts).to_bytes(8, "little"))
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def geometry_fields(geometry: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Flatten parsed geometry into sorted (dotted name, canonical JSON) pairs.

    10000 and 10000.0 are the same value. TypeError for a value JSON cannot hold, ValueError for NaN,
    infinity or a field name with a dot.
    """
    fields: list[tuple[str, str]] = []
    _flatten("", geometry, fields)
    return tuple(sorted(fields))


def _flatten(prefix: str, mapping: Mapping[str, object], fields: list[tuple[str, str]]) -> None:
    for name, value in mapping.items():
        if not isinstance(name, str) or "." in name:
            raise ValueError(f"geometry field {name!r} must be a string without a dot")
        if isinstance(value, Mapping) and value:
            _flatten(f"{prefix}{name}.", value, fields)
        else:
            text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
            fields.append((prefix + name, text))


def _plain(value: object) -> object:
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value


class ModelIdentity(BaseModel):
    """Everything that decides whether stored numbers mean the same thing to a loaded model."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    weights_hash: str
    geometry: tuple[tuple[str, str], ...]  # sorted (dotted name, canonical JSON of the value)
    dtype: str
    tokenizer_hash: str
    prompt_encoder: str
    adapter: str = ""

    @field_validator("geometry")
    @classmethod
    def _sorted_unique(cls, value: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        names = [name for name, _ in value]
        if names != sorted(set(names)):
            raise ValueError("geometry fields must be sorted and unique")
        return value

    @classmethod
    def of(
        cls,
        *,
        weights_hash: str,
        geometry: Mapping[str, object],
        dtype: str,
        tokenizer_hash: str,
        prompt_encoder: str,
        adapter: str = "",
    ) -> ModelIdentity:
        """Build an identity from parsed geometry; errors as ``geometry_fields``."""
        return cls(
            weights_hash=weights_hash,
            geometry=geometry_fields(geometry),
            dtype=dtype,
            tokenizer_hash=tokenizer_hash,
            prompt_encoder=prompt_encoder,
            adapter=adapter,
        )

    @property
    def config_hash(self) -> str:
        """SHA-256 (hex) over the geometry fields."""
        return tagged_hash("redknot.config", ((name, text.encode()) for name, text in self.geometry))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over every field: equal digests are equal identities."""
        return tagged_hash(
            "redknot.model",
            (
                ("weights", self.weights_hash.encode()),
                ("config", self.config_hash.encode()),
                ("dtype", self.dtype.encode()),
                ("tokenizer", self.tokenizer_hash.encode()),
                ("prompt_encoder", self.prompt_encoder.encode()),
                ("adapter", self.adapter.encode()),
            ),
        )


def differences(a: ModelIdentity, b: ModelIdentity) -> tuple[str, ...]:
    """Name the fields in which two identities differ, geometry as ``geometry.<field>``; empty when equal."""
    plain = ("weights_hash", "dtype", "tokenizer_hash", "prompt_encoder", "adapter")
    found = [name for name in plain if getattr(a, name) != getattr(b, name)]
    left, right = dict(a.geometry), dict(b.geometry)
    found += [f"geometry.{name}" for name in sorted(left.keys() | right.keys()) if left.get(name) != right.get(name)]
    return tuple(found)


def token_array(token_ids: TokenIds) -> npt.NDArray[np.int32]:
    """Return token ids as a contiguous little-endian int32 array, [n].

    InputError for another rank, a type that is not an integer, or a value outside [0, 2**31).
    """
    raw = token_ids.detach().cpu().numpy() if isinstance(token_ids, torch.Tensor) else np.asarray(token_ids)
    if raw.ndim != 1:
        raise InputError(f"token ids must be one-dimensional, found shape {raw.shape}")
    if raw.size == 0:
        return np.zeros(0, dtype="<i4")
    if raw.dtype.kind not in "iu":
        raise InputError(f"token ids must be integers, found {raw.dtype}")
    if int(raw.min()) < 0 or int(raw.max()) > 2**31 - 1:
        raise InputError(f"token ids must be in [0, 2**31), found {int(raw.min())} to {int(raw.max())}")
    return np.ascontiguousarray(raw, dtype="<i4")


def token_hash(token_ids: TokenIds) -> str:
    """Return the content hash (hex) of token ids; errors as ``token_array``."""
    return token_bytes_hash(token_array(token_ids).tobytes())


def token_bytes_hash(ids: bytes) -> str:
    """Return the same hash from bytes that should be little-endian int32 ids; whether they are is not looked at."""
    return tagged_hash("redknot.tokens", (("ids", ids),))


def artifact_id_of(namespace: str, model_digest: str, tokens: str, needs: Iterable[str], *, world: int = 1) -> str:
    """Return the id (hex) of the artifact of one document for one namespace, model, set of needs and TP size.

    ``tokens`` is the ``token_hash`` of its ids; ``world`` is 1 where nothing is sharded. The layout version is part of
    the id, so another layout is a clean miss.
    """
    unique = sorted(set(needs))
    return tagged_hash(
        "redknot.artifact",
        [
            ("layout", str(LAYOUT_VERSION).encode()),
            ("namespace", namespace.encode()),
            ("model", model_digest.encode()),
            ("tokens", tokens.encode()),
            ("world", str(world).encode()),
            *(("need", need.encode()) for need in unique),
        ],
    )
