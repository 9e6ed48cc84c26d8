"""A module in SGLang's place, so that starting and stopping servers is tested where SGLang is not installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.child import ROOT


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, str]]:
    """Puts the source of `sglang.launch_server` in place; the environment in which a child finds it."""

    def put(source: str) -> dict[str, str]:
        folder = tmp_path / "site" / "sglang"
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "launch_server.py").write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(str(folder.parent))
        monkeypatch.delitem(sys.modules, "sglang", raising=False)
        monkeypatch.setenv("PYTHONPATH", f"{folder.parent}:{ROOT}")
        return dict(os.environ)

    return put
