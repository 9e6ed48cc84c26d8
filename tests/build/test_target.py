"""Which needs one artifact can hold together, and what it takes on disk."""

from __future__ import annotations

import pytest

from redknot.build.target import make_target
from redknot.errors import ConfigError
from redknot.model.profile import SHIPPED, Profile, Treatment
from redknot.nano.parameters import GEOMETRY


def needs(*names: str) -> tuple[str, ...]:
    return make_target(GEOMETRY, [SHIPPED[name] for name in names], 1, "n").needs


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["turbo"], ("latents", "window_tail")),
        (["rowsparse"], ("latents", "streams:1", "window_all", "window_tail")),
        (["turbo", "rowsparse"], ("latents", "streams:1", "window_all", "window_tail")),
        (["headsplit", "turbo"], ("latents", "window_tail", "zl:1:0")),
        (["recompute", "headsplit", "headsplit"], ("zl:1:0",)),
        (list(SHIPPED), ("latents", "streams:1", "window_all", "window_tail", "zl:1:0")),
    ],
)
def test_needs_are_united(names, expected):
    assert needs(*names) == expected


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "recompute"])
def test_a_united_artifact_serves_each_of_its_profiles(name):
    assert set(SHIPPED[name].needs()) <= set(needs(*SHIPPED))


def test_recompute_has_nothing_to_build():
    with pytest.raises(ConfigError, match="nothing to build: recompute"):
        needs("recompute")


HEADSPLIT = SHIPPED["headsplit"].model_copy(update={"name": "other", "global_heads": (1,)})
FENCED = SHIPPED["rowsparse"].model_copy(update={"name": "fenced", "fence_layers": 2})


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        ([SHIPPED["headsplit"], HEADSPLIT], "profiles headsplit, other: .* zl:1:0 and zl:1:1"),
        ([SHIPPED["rowsparse"], FENCED], "streams:1 and streams:2"),
        ([Profile(name="deep", fence_layers=6)], "deep does not fit the model: 12 layers leave no middle for 6.6"),
        ([Profile(name="wide", middle_active=Treatment.GLOBAL_Z, global_heads=(0, 8))], "wide .* Global head 8"),
    ],
)
def test_profiles_that_one_artifact_cannot_serve(profiles, message):
    with pytest.raises(ConfigError, match=message):
        make_target(GEOMETRY, profiles, 1, "n")


@pytest.mark.parametrize(("tp_size", "namespace"), [(0, "n"), (-1, "n"), (3, "n"), (1, ""), (1, "a\nb")])
def test_impossible_ranks_and_namespaces(tp_size, namespace):
    with pytest.raises(ConfigError):
        make_target(GEOMETRY, [SHIPPED["combined"]], tp_size, namespace)


def test_only_sharded_artifacts_depend_on_the_ranks():
    assert make_target(GEOMETRY, [SHIPPED["rowsparse"]], 2, "n").world == 1
    assert make_target(GEOMETRY, [SHIPPED["combined"]], 2, "n").world == 2
