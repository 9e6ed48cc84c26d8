"""A short soak; `python -m tests.latents.soak` runs a long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.latents.soak import soak


@pytest.mark.parametrize("seed", [0, 1])
def test_a_short_soak(tmp_path: Path, seed: int) -> None:
    counters = soak(3000, seed, tmp_path)
    for name in ("shares", "copies", "dedup_collisions", "demotions_disk", "promotions_disk", "promotions_host"):
        assert counters[name] > 0
