"""Metrics of several processes: the plugin must not decide for SGLang how they are kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")


def test_hooks_are_loaded_without_prometheus() -> None:
    """At its import it chooses whether counts are shared; SGLang sets the variable for that after it loads plugins."""
    code = "import sys, sglang_patches.table; print('prometheus_client' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
