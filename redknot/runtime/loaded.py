"""A checkpoint in memory, which any number of engines share: weights, tokenizer, identity."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from redknot.artifact.identity import ModelIdentity
from redknot.artifact.store import ArtifactStore
from redknot.comm.group import Group, OneProcess
from redknot.config import load_settings
from redknot.device import find_device
from redknot.model.checkpoint import load_model
from redknot.model.tokenizer import Tokenizer, load_tokenizer
from redknot.ops.dispatch import Mode
from redknot.runtime.identity import model_identity
from redknot.runtime.library import Library
from redknot.runtime.model import Model

_log = logging.getLogger(__name__)
DTYPE = torch.float32  # what runs and is stored, on any device


@dataclass(frozen=True, eq=False)
class Loaded:
    """The model that a folder held when it was loaded; nothing of it changes while engines run."""

    checkpoint: Path
    model: Model

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Of the checkpoint's tokenizer.json; CheckpointError without a usable one."""
        return load_tokenizer(self.checkpoint, self.model.geometry)

    @cached_property
    def identity(self) -> ModelIdentity:
        """What artifacts are bound to; CheckpointError when weights or tokenizer cannot be read."""
        return model_identity(self.checkpoint, self.model.geometry, DTYPE, load_settings().cache_dir)

    def library(self, store: Path, namespace: str, needs: tuple[str, ...]) -> Library:
        """The documents of a store that a namespace has and that meet ``needs``; StoreError if it cannot be opened."""
        opened, shard = ArtifactStore(store), self.model.group.shard
        return Library(opened, self.identity, self.model.geometry, (namespace,), needs, shard)


def load(checkpoint: str | Path, group: Group | None = None, device: str = "cpu", mode: Mode = Mode.AUTO) -> Loaded:
    """Load what a rank of ``group`` (by default this process alone) holds of a checkpoint folder, on a device.

    ``device`` is "cpu", "cuda" (the current one) or "cuda:N". ``mode`` says whether kernels are wanted; as a rule they
    run on a GPU where they can, and references everywhere else (``Model.operations``). Raises UnsupportedModelError,
    CheckpointError, or ConfigError where the device or a kernel that was asked for cannot be had.
    """
    group, place = group if group is not None else OneProcess(), find_device(device)
    geometry, weights = load_model(Path(checkpoint), DTYPE, group.shard, place)
    model = Model(geometry, weights, group, place, mode)
    for op, reason in model.operations.reasons.items():
        _log.warning("no kernel for %s on %s: %s", op, place, reason)
    if model.operations.passed_over:
        _log.info("segment attention is not FlashMLA's: %s", model.operations.passed_over)
    return Loaded(Path(checkpoint), model)
