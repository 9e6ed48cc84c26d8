"""A fresh store per test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from redknot.artifact.store import ArtifactStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[ArtifactStore]:
    with ArtifactStore(root, create=True) as opened:
        yield opened
