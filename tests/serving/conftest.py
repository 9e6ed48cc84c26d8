"""A random checkpoint, four documents in a store, and engines over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from redknot.runtime.engine import Engine
from tests.kit.requests import document, publish, use_cache, write_checkpoint


@dataclass(frozen=True)
class World:
    checkpoint: Path
    store: Path
    documents: list[list[int]]
    engines: dict[str, Engine]  # embedded ones, by profile: what the server is compared with


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("serving")
    patch = use_cache(folder / "cache")
    checkpoint = write_checkpoint(folder / "model")
    documents = [document(length, seed) for seed, length in enumerate((96, 160, 130, 333))]
    publish(checkpoint, folder / "store", documents)
    engines = {name: Engine(checkpoint, folder / "store", name) for name in ("rowsparse", "turbo")}
    yield World(checkpoint, folder / "store", documents, engines)
    patch.undo()
