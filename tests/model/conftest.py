"""A quantised checkpoint, written once for all tests that only read it."""

from __future__ import annotations

import pytest

from tests.kit.quantised import Recipe, Written, write


@pytest.fixture(scope="session")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(tmp_path_factory.mktemp("odd"), Recipe())
