"""Servers are dear to start, so tests share them: one of nano for the whole session, others for a module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from redknot.runtime.engine import Engine
    from tests.e2e.server.reference import Reference
    from tests.kit.server import Server

PROFILES = ("rowsparse", "turbo")
# Lengths at seams: of a block (32 tokens in nano), a window (32), and of Flash's blocks.
SEAMS = (1, 3, 4, 31, 32, 33, 127, 128, 129, 257)


@dataclass
class World:
    """nano, a store, and what is in it."""

    checkpoint: Path
    store: Path
    texts: dict[str, str]  # by name; documents of 512 tokens
    documents: dict[str, list[int]]  # by name: all, the texts' too
    _engines: dict[str, Engine] = field(default_factory=dict)

    def engine(self, profile: str = "rowsparse") -> Engine:
        """The embedded engine that the server is compared with."""
        from redknot.runtime.engine import Engine

        if profile not in self._engines:
            self._engines[profile] = Engine(self.checkpoint, self.store, profile)
        return self._engines[profile]

    @cached_property
    def reference(self) -> Reference:
        from tests.e2e.server.reference import Reference

        return Reference()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Texts of the examples, and random documents that end at every seam."""
    from redknot.model.profile import SHIPPED
    from redknot.model.tokenizer import load_tokenizer
    from tests.kit.requests import ROOT, document, publish, use_cache

    folder = tmp_path_factory.mktemp("world")
    patch = use_cache(folder / "cache")
    checkpoint = ROOT / "models" / "nano"
    tokenizer = load_tokenizer(checkpoint)
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples/corpus").glob("*.txt"))}
    documents = {name: tokenizer.encode(text).tolist() for name, text in texts.items()}
    documents |= {f"seam-{length}": document(length, 40) for length in SEAMS}
    publish(checkpoint, folder / "store", list(documents.values()), [SHIPPED[name] for name in PROFILES])
    yield World(checkpoint, folder / "store", texts, documents)
    patch.undo()


@pytest.fixture(scope="session")
def main(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that most tests ask."""
    from tests.kit.server import serving

    options = ("--enable-metrics", "--context-length", 4096, "--max-total-tokens", 16384)
    with serving(tmp_path_factory.mktemp("main"), world.store, *options) as server:
        yield server
