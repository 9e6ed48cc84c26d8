"""The documents of a store as each namespace sees them: a library per namespace and per what a profile reads."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from redknot.artifact.identity import ModelIdentity
from redknot.artifact.store import ArtifactStore
from redknot.config import load_settings
from redknot.errors import StoreError
from redknot.model.geometry import Geometry
from redknot.model.profile import Profile
from redknot.runtime.agreement import Agreement
from redknot.runtime.identity import model_identity
from redknot.runtime.library import Library
from redknot.runtime.metrics import Metrics
from redknot.runtime.model import Model

_log = logging.getLogger(__name__)


class Libraries:
    """See the module. ``shared`` is the namespace that every other one sees too; None: there is none."""

    def __init__(
        self,
        checkpoint: Path,
        store: Path | None,
        model: Model,
        metrics: Metrics,
        dtype: torch.dtype,
        shared: str | None = None,
    ) -> None:
        """Open the store; one that cannot be opened is not an error but the reason of every request."""
        self.geometry: Geometry = model.geometry
        self.store: ArtifactStore | None = None
        self.unavailable = "no store was given"
        self._model = model
        self._metrics = metrics
        self._shared = shared
        self._identity: ModelIdentity | None = None
        self._libraries: dict[tuple[str, tuple[str, ...]], Library] = {}
        if store is None:
            return
        try:
            self.store = ArtifactStore(store)
        except StoreError as error:
            self.unavailable = str(error)
            _log.warning("every request will run dense: %s", error)
            return
        self._identity = model_identity(checkpoint, self.geometry, dtype, load_settings().cache_dir)
        opened = self.store
        metrics.watch("store", lambda: opened.counters)

    @property
    def checkpoint(self) -> str | None:
        """The digest of the model's identity, which its artifacts name too; None without a store."""
        return None if self._identity is None else self._identity.digest

    def namespaces(self, namespace: str) -> tuple[str, ...]:
        """The namespaces that a request of one may read, its own first."""
        return (namespace,) if self._shared in (None, namespace) else (namespace, str(self._shared))

    def agreement(self, namespace: str, profile: Profile) -> Agreement:
        """One profile over the documents that a namespace sees."""
        library = None
        if self.store is not None:
            library = self._library(self.store, namespace, profile)
        return Agreement(library, self.unavailable, profile, self._model.group, self._metrics)

    def _library(self, store: ArtifactStore, namespace: str, profile: Profile) -> Library:
        key = namespace, profile.needs()
        if key not in self._libraries:
            assert self._identity is not None  # the store was opened
            shard = self._model.group.shard
            made = Library(store, self._identity, self.geometry, self.namespaces(namespace), profile.needs(), shard)
            self._metrics.watch("index", lambda: made.index.counters)
            self._libraries[key] = made
        return self._libraries[key]
