"""The whole engine through the Triton kernels, in the interpreter: the same answers as through the references."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from redknot.model.profile import SHIPPED, Profile, load_profile
from redknot.ops.dispatch import Mode
from redknot.runtime.engine import Engine, Result
from redknot.runtime.loaded import load
from tests.kit.engines import write_smallest
from tests.kit.kernels import INTERPRETED
from tests.kit.requests import BOS, ROOT, document, publish, use_cache

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the interpreter is for the CPU")
DOCS = [document(length, number) for number, length in enumerate((40, 24))]
IDS = [BOS, *document(2, 3), *DOCS[0], *DOCS[1], *document(4, 4)]
SHORT = IDS[:31]  # where every row runs
PROFILES = ("fan-out", "combined", "turbo")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("kernels")
    patch = use_cache(folder / "cache")
    checkpoint = write_smallest(folder / "model")
    publish(checkpoint, folder / "store", DOCS, [p for p in SHIPPED.values() if p.reuses])
    yield checkpoint, folder / "store"
    patch.undo()


def profile_of(name: str) -> Profile:
    return SHIPPED[name] if name in SHIPPED else load_profile(ROOT / f"configs/profiles/{name}.json")


def answer(world: tuple[Path, Path], mode: Mode, profile: str) -> Result:
    checkpoint, store = world
    with Engine(load(checkpoint, mode=mode), store, profile_of(profile)) as engine:
        assert engine.model.operations.in_place == (mode is Mode.KERNEL)
        ids = IDS if engine.profile.reuses else SHORT
        found = engine.generate(token_ids=ids, max_new_tokens=3, stop_at_eos=False)
        assert engine.check_books() == []
    return found


@pytest.mark.parametrize("profile", PROFILES)
def test_the_engine_answers_alike(world: tuple[Path, Path], profile: str) -> None:
    found, expected = answer(world, Mode.KERNEL, profile), answer(world, Mode.AUTO, profile)
    assert found.token_ids == expected.token_ids
    assert float((found.logits - expected.logits).abs().max()) <= 1e-4 * float(expected.logits.abs().max())
    assert found.report.arm == expected.report.arm == profile_of(profile).arm
    assert found.report.counters == expected.report.counters  # the same rows, pairs, entries and experts ran
