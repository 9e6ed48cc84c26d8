"""What tests of the harness share: a small checkpoint, and runs that no machine was asked about."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from eval.arms import Arm
from eval.results import Run
from tests.kit.corpus import write_checkpoint


def make_run(arms: Mapping[str, Arm], **changes: Any) -> Run:
    """A run record of some arms."""
    fields: dict[str, Any] = {
        "run": "r1",
        "tool": "longbench",
        "started": "2026-01-01T00:00:00+00:00",
        "command": ("python",),
        "commit": "",
        "versions": {"redknot": "0"},
        "hardware": {},
        "model": {"name": "small", "config": "c", "weights": "w", "tokenizer": "t", "dtype": "float32"},
        "engine": "embedded",
        "tp": 1,
        "arms": {name: arm.profile.model_dump(mode="json") for name, arm in arms.items()},
        "digests": {name: arm.profile.digest() for name, arm in arms.items()},
        "options": {},
    }
    return Run(**(fields | changes))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDKNOT_CACHE_DIR", str(tmp_path / "cache"))
