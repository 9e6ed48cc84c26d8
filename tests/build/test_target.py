"""Which needs one artifact can hold together, and what it takes on disk."""

from __future__ import annotations

import math

import pytest

from redknot.artifact.needs import parse_strategy
from redknot.artifact.sections import section_specs
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


@pytest.mark.parametrize(
    ("names", "windows", "expected"),
    [
        (["turbo"], "all", ("latents", "window_tail")),
        (["turbo"], "none", ("latents", "window_none")),
        (["turbo"], "checkpoints:4", ("latents", "window_checkpoints:4")),
        (["turbo", "headsplit"], "none", ("latents", "window_none", "zl:1:0")),
        (["rowsparse"], "all", ("latents", "streams:1", "window_all", "window_tail")),
    ],
)
def test_windows_are_part_of_the_needs(names, windows, expected):
    target = make_target(GEOMETRY, [SHIPPED[name] for name in names], 1, "n", parse_strategy(windows))
    assert target.needs == expected


@pytest.mark.parametrize("windows", ["none", "checkpoints:1"])
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["rowsparse"], "inside documents reads all window rows"),
        (["turbo", "combined"], "inside documents reads all window rows"),
        (["headsplit"], "read no window rows"),
    ],
)
def test_windows_that_profiles_cannot_do_without(names, windows, message):
    with pytest.raises(ConfigError, match=f"windows {windows}: .*{message}"):
        make_target(GEOMETRY, [SHIPPED[name] for name in names], 1, "n", parse_strategy(windows))


def test_bytes_of_windows_on_disk():
    """As many as the sections hold, at each strategy; the fewer rows, the fewer bytes."""
    layers, window, d, block = GEOMETRY.num_layers, GEOMETRY.window, GEOMETRY.head_dim, GEOMETRY.block_length

    def payload(windows: str, tokens: int) -> int:
        target = make_target(GEOMETRY, [SHIPPED["turbo"]], 1, "n", parse_strategy(windows))
        return sum(4 * math.prod(shape) for _, shape in section_specs(GEOMETRY, tokens, target.needs).values())

    row = 4 * layers * d
    for tokens in (1, block - 1, block, 5 * block + 3, 16 * block):
        entries = payload("none", tokens)
        assert payload("all", tokens) == entries + row * min(tokens, window)
        for every in (1, 4, 16):
            count = tokens // (every * block)
            assert payload(f"checkpoints:{every}", tokens) == entries + row * count * window
