"""What all tests share: random checkpoints, made on first use, and how hypothesis draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.kit.oracle import Oracle


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
