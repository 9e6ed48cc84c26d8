"""One random checkpoint and a store of documents that serve every profile, for all tests that only read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

from redknot.artifact.certificate import Certificate
from redknot.model.checkpoint import load_model
from redknot.runtime.engine import Engine
from redknot.runtime.model import Model
from tests.kit.requests import document, publish, use_cache, write_checkpoint

LENGTHS = (96, 130, 64, 77, 257)


@dataclass
class Served:
    """A checkpoint, its model, a store, the documents in it, and engines on them."""

    checkpoint: Path
    store: Path
    documents: list[list[int]]
    certificates: list[Certificate]
    engines: dict[str, Engine] = field(default_factory=dict)

    @cached_property
    def model(self) -> Model:
        return Model(*load_model(self.checkpoint))

    def engine(self, profile: str = "rowsparse") -> Engine:
        """An engine that tests share; whoever breaks something makes one of their own."""
        if profile not in self.engines:
            self.engines[profile] = Engine(self.checkpoint, self.store, profile)
        return self.engines[profile]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    patch = use_cache(tmp_path_factory.mktemp("cache"))
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("served") / "model")
    store = tmp_path_factory.mktemp("store") / "store"
    documents = [document(length, number) for number, length in enumerate(LENGTHS)]
    yield Served(checkpoint, store, documents, publish(checkpoint, store, documents))
    patch.undo()
