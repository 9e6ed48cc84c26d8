"""The identity of a loaded model: what every artifact is bound to."""

from __future__ import annotations

from pathlib import Path

import torch

from redknot.artifact.identity import ModelIdentity
from redknot.artifact.weights import weights_identity
from redknot.model.geometry import Geometry
from redknot.model.tokenizer import tokenizer_hash

PROMPT_ENCODER = "alone-plain-1"
"""How text becomes ids: each document alone, no BOS, control tokens as plain text. A change makes other artifacts."""

WEIGHT_CACHE_FILE = "weights.json"


def model_identity(
    checkpoint: Path, geometry: Geometry, dtype: torch.dtype, cache_dir: Path, *, verify_weights: bool = False
) -> ModelIdentity:
    """Identity of a checkpoint folder held as ``dtype``; with ``verify_weights`` no hash is taken from ``cache_dir``.

    CheckpointError when weights or tokenizer cannot be read.
    """
    return ModelIdentity.of(
        weights_hash=weights_identity(checkpoint, cache_dir / WEIGHT_CACHE_FILE, verify=verify_weights),
        geometry=geometry.identity_fields(),
        dtype=str(dtype).removeprefix("torch."),
        tokenizer_hash=tokenizer_hash(checkpoint),
        prompt_encoder=PROMPT_ENCODER,
    )
