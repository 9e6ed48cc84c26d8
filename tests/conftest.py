"""What all tests share: random checkpoints, made on first use, and how hypothesis draws."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.kit.oracle import Oracle

# Folders that need the `sglang` extra, which has an environment of its own.
_TESTS = Path(__file__).parent
NEED_SGLANG = (_TESTS / "sglang_patches", _TESTS / "e2e" / "server")
HAS_SGLANG = find_spec("sglang") is not None

# Triton reads it when it is first imported, by whichever test. SGLang's own kernels are not to be interpreted.
if not HAS_SGLANG:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    left_out = not HAS_SGLANG and any(collection_path.is_relative_to(folder) for folder in NEED_SGLANG)
    return True if left_out else None


def pytest_report_header() -> str | None:
    if HAS_SGLANG:
        return None
    folders = " and ".join(path.relative_to(_TESTS.parent).as_posix() for path in NEED_SGLANG)
    return f"without sglang: {folders} are left out; `make test-sglang` runs them"


# The same examples on every machine, however slow it is; `--hypothesis-profile=thorough` draws many new ones.
hypothesis.settings.register_profile("redknot", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("redknot")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """A random checkpoint in the proportions of nano."""
    from tests.kit import oracle

    return oracle.make(tmp_path_factory.mktemp("small"), oracle.SMALL, seed=1)


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """A random checkpoint in the proportions of Flash, with eight output groups."""
    from tests.kit import oracle

    return oracle.make(tmp_path_factory.mktemp("wide"), oracle.WIDE, seed=1)
