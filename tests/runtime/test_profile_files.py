"""Every profile file of the repository on nano itself: requests run as the profile says, and say so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from redknot.build.target import make_target
from redknot.errors import ConfigError
from redknot.model.profile import SHIPPED, Profile, load_profile
from redknot.nano.parameters import GEOMETRY
from redknot.runtime.engine import Engine
from redknot.runtime.loaded import Loaded, load
from tests.kit.requests import ROOT, document, publish, use_cache

NANO = ROOT / "models/nano"
FILES = [path for path in sorted((ROOT / "configs/profiles").glob("*.json")) if not path.stem.startswith("flash-")]
PROFILES = [*SHIPPED.values(), *(load_profile(str(path)) for path in FILES)]
DOCUMENTS = [document(length, number) for number, length in enumerate((192, 160))]
SEGMENTS = [*DOCUMENTS, document(40, 9)]


def groups() -> list[list[Profile]]:
    """The profiles that reuse, those together that one artifact serves: none holds two depths or two head tables."""
    found: list[list[Profile]] = []
    for profile in PROFILES:
        for group in found if profile.reuses else ():
            with suppress(ConfigError):
                make_target(GEOMETRY, [*group, profile], 1, "default")
                group.append(profile)
                break
        else:
            found += [[profile]] if profile.reuses else []
    return found


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Loaded, Path]]:
    """nano in memory, and artifacts of two documents that serve every profile."""
    patch = use_cache(tmp_path_factory.mktemp("cache"))
    store = tmp_path_factory.mktemp("store") / "store"
    for together in groups():
        publish(NANO, store, DOCUMENTS, together)
    yield load(NANO), store
    patch.undo()


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_nano_runs_a_request_as_each_profile_says(loaded: tuple[Loaded, Path], profile: Profile) -> None:
    model, store = loaded
    with Engine(model, store, profile) as engine:
        result = engine.generate(segments=SEGMENTS, max_new_tokens=1)
        report = result.report
        assert report.arm == profile.arm, report.detail
        assert (report.profile, report.profile_digest) == (profile.name, profile.digest())
        assert torch.isfinite(result.logits).all()
        skipped = report.reused_tokens if profile.reuses_rows else 0  # else only heads of them did not run
        assert report.forwarded_rows == report.prompt_tokens - skipped
        assert (report.reused_tokens > 0) == profile.reuses
        assert (report.counters.split_row_layers > 0) == profile.splits_heads
        assert (report.counters.expert_pairs < report.counters.expert_pairs_native) == (profile.fan_out is not None)
        again = engine.generate(segments=SEGMENTS, max_new_tokens=1).report
        assert (again.cached_tokens > 0) == profile.prefix_cache
        assert engine.check_books() == []
