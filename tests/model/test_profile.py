"""Profiles are data: validated in one line, hashed by content, their needs derived."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from redknot.build.target import make_target
from redknot.errors import ConfigError
from redknot.model.geometry import LayerKind, geometry_from_config
from redknot.model.heads import load_heads
from redknot.model.profile import (
    ARMS,
    SHIPPED,
    FanOutPolicy,
    Profile,
    Protected,
    Selector,
    Treatment,
    load_profile,
    misfit,
)
from redknot.model.published import published_config
from redknot.nano.parameters import GEOMETRY

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs/profiles").glob("*.json"))


def write(folder: Path, content: object) -> str:
    path = folder / "profile.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_profiles_of_the_repository_load_and_can_be_built(path):
    profile = load_profile(str(path))
    assert profile.name == path.stem
    assert profile.name not in SHIPPED
    assert misfit(profile, FLASH if profile.name.startswith("flash-") else GEOMETRY) == ""
    if profile.reuses:
        assert set(profile.needs()) <= set(make_target(GEOMETRY, [profile], 1, "n").needs)
    else:
        assert profile.needs() == ()


def test_no_two_profiles_are_the_same():
    profiles = [*SHIPPED.values(), *(load_profile(str(path)) for path in FILES)]
    assert len({profile.digest() for profile in profiles}) == len(profiles)
    for_nano = [profile for profile in profiles if not profile.name.startswith("flash-")]
    assert len({profile.model_dump_json(exclude={"name"}) for profile in for_nano}) == len(for_nano)


NO_PICK = {"selector": Selector.NONE, "budget": 0.0}
VARIANTS = {
    "prefix": ("recompute", {"prefix_cache": True}),
    "fan-out": ("recompute", {"fence_layers": 1, "middle_idle": Treatment.FULL, "fan_out": FanOutPolicy(tau=0.8)}),
    "plain": ("turbo", {"protected": Protected(first_windows=0, last_windows=0, indexed_share=0.0)}),
    "boundary": ("turbo", {"fence_layers": 1, "fence_idle": Treatment.FULL}),
    "deviation-15": ("deviation", {"budget": 0.15}),
    "rowsparse-0": ("rowsparse", {**NO_PICK, "protected": Protected(indexed_share=0.0)}),
    **{f"rowsparse-{n:02}": ("rowsparse", {"budget": n / 100}) for n in (5, 20, 25, 50)},
    **{f"rowsparse-fence-{n}": ("rowsparse", {"fence_layers": n}) for n in (0, 2, 3)},
    **{f"combined-{n}": ("combined", {"budget": n / 100}) for n in (20, 25)},
    **{f"headsplit-heads-{n}": ("headsplit", {"global_heads": (n,)}) for n in range(1, 8)},
    "headsplit-table": ("headsplit", {"head_table": load_heads(ROOT / "configs/heads/nano.json").table}),
    "fixed-3": ("rowsparse", {"fan_out": FanOutPolicy(tau=0.5)}),
    "adaptive-80": ("rowsparse", {"fan_out": FanOutPolicy(tau=0.8)}),
}
"""Each file, the profile that it is but for its name, and what it changes there."""


@pytest.mark.parametrize("name", VARIANTS)
def test_files_change_what_their_names_say_and_nothing_else(name):
    base, changes = VARIANTS[name]
    like = SHIPPED.get(base) or load_profile(str(ROOT / f"configs/profiles/{base}.json"))
    profile = load_profile(str(ROOT / f"configs/profiles/{name}.json"))
    assert profile == like.model_copy(update={"name": name, **changes})
    ablations = ("rowsparse-", "headsplit-", "combined-", "deviation-", "fixed-", "adaptive-")
    assert len(changes) == 1 or name == "rowsparse-0" or not name.startswith(ablations)


def test_every_file_is_accounted_for():
    assert {path.stem for path in FILES if not path.stem.startswith("flash-")} == {*VARIANTS, "deviation"}


def test_head_tables_try_every_position_of_nano():
    """With ``headsplit`` itself, which has position 0."""
    tables = [load_profile(str(path)).global_heads for path in FILES if path.stem.startswith("headsplit-heads-")]
    assert sorted([SHIPPED["headsplit"].global_heads, *tables]) == [(n,) for n in range(GEOMETRY.heads_per_group)]


@pytest.mark.parametrize(
    ("changes", "arm"),
    [
        ({}, "reuse"),
        ({"fan_out": FanOutPolicy(tau=0.8)}, "reuse"),
        ({"middle_idle": Treatment.FULL, **NO_PICK, "protected": Protected(indexed_share=0)}, "dense"),
        (
            {"middle_idle": Treatment.FULL, **NO_PICK, "protected": Protected(indexed_share=0)}
            | {"fan_out": FanOutPolicy(tau=0.8)},
            "fan-out",
        ),
    ],
)
def test_the_arm_follows_from_what_is_left_out(changes, arm):
    assert Profile(name="p", **changes).arm == arm
    assert arm in ARMS


@pytest.mark.parametrize("name", [name for name, profile in SHIPPED.items() if profile.reuses])
def test_what_reuse_leaves_is_no_exact_prefix(name):
    with pytest.raises(ValueError, match="prefix_cache needs middle_idle full and no fan_out"):
        Profile.model_validate(SHIPPED[name].model_dump() | {"prefix_cache": True})


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_by_exact_name(name, tmp_path):
    assert load_profile(name) is SHIPPED[name]
    assert SHIPPED[name].name == name
    # Written out and read back it is the same profile.
    same = load_profile(write(tmp_path, SHIPPED[name].model_dump_json()))
    assert same == SHIPPED[name]
    assert same.digest() == SHIPPED[name].digest()


def test_the_five_shipped_profiles():
    """Treatments, protected widths and fences; nano has one fence layer and no recent tail."""

    def table(name: str) -> tuple[object, ...]:
        p = SHIPPED[name]
        widths = (p.protected.first_windows, p.protected.last_windows, p.protected.recent_tail)
        return p.fence_idle, p.middle_active, p.middle_idle, *widths, p.fence_layers

    full, split, skip = Treatment.FULL, Treatment.GLOBAL_Z, Treatment.SKIP
    assert list(SHIPPED) == ["recompute", "headsplit", "combined", "rowsparse", "turbo"]
    assert table("headsplit") == (full, split, split, 1, 1, 0, 1)
    assert table("combined") == (full, split, skip, 1, 1, 0, 1)
    assert table("rowsparse") == (full, full, skip, 1, 1, 0, 1)
    assert table("turbo") == (skip, full, skip, 1, 0, 0, 0)
    assert [name for name, profile in SHIPPED.items() if not profile.reuses] == ["recompute"]
    assert [name for name, profile in SHIPPED.items() if profile.reuses_rows] == ["combined", "rowsparse", "turbo"]
    assert all(profile.fan_out is None for profile in SHIPPED.values())
    assert all(profile.budget in (0.0, 0.10) for profile in SHIPPED.values())


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("recompute", ()),
        ("headsplit", ("zl:1:0",)),
        ("combined", ("latents", "streams:1", "window_all", "zl:1:0")),
        ("rowsparse", ("latents", "streams:1", "window_all")),
        ("turbo", ("latents", "window_tail")),
    ],
)
def test_needs_of_the_shipped_profiles(name, needs):
    assert SHIPPED[name].needs() == needs


TAILS = {"budget": 0.0, "selector": Selector.NONE}
NO_ENDS = Protected(last_windows=0, indexed_share=0.0)


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, ("latents", "streams:1", "window_all")),
        ({"fence_layers": 3}, ("latents", "streams:3", "window_all")),
        ({"fence_layers": 0}, ("latents", "window_all")),
        ({"fence_idle": Treatment.SKIP}, ("latents", "window_all")),
        (
            {"middle_active": Treatment.GLOBAL_Z, "global_heads": (5, 2)},
            ("latents", "streams:1", "window_all", "zl:1:2,5"),
        ),
        ({"protected": Protected(last_windows=0, indexed_share=0.0), **TAILS}, ("latents", "streams:1", "window_tail")),
        ({"protected": Protected(last_windows=1, indexed_share=0.0), **TAILS}, ("latents", "streams:1", "window_all")),
        (
            {"protected": Protected(last_windows=0, indexed_share=0.0, recent_tail=1), **TAILS},
            ("latents", "streams:1", "window_all"),
        ),
        ({"protected": Protected(last_windows=0), "budget": 0.0}, ("latents", "streams:1", "window_all")),
        ({"protected": Protected(last_windows=0, indexed_share=0.0)}, ("latents", "streams:1", "window_all")),
        ({"fan_out": FanOutPolicy(k_min=3, tau=0.8)}, ("latents", "streams:1", "window_all")),
        ({"selector": Selector.DEVIATION}, ("latents", "streams:1", "window_all")),
        ({"selector": Selector.DEVIATION, "protected": NO_ENDS}, ("latents", "streams:1", "window_all")),
        (
            {"selector": Selector.DEVIATION, "protected": Protected(last_windows=0), "budget": 0.0},
            ("latents", "streams:1", "window_all"),
        ),
        (
            {"selector": Selector.DEVIATION, "protected": NO_ENDS, "budget": 0.0},
            ("latents", "streams:1", "window_tail"),
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_needs_are_derived(changes, needs):
    assert Profile(name="p", **changes).needs() == needs


def test_the_order_of_the_head_table_means_nothing_to_an_artifact():
    one, other = (Profile(name="p", middle_active=Treatment.GLOBAL_Z, global_heads=heads) for heads in ((1, 4), (4, 1)))
    assert one.needs() == other.needs()


def test_digests_change_with_the_content():
    base = Profile(name="p")
    assert base.digest() == Profile(name="p").digest()
    assert len(base.digest()) == 64
    changes = [
        {"name": "q"},
        {"fence_layers": 2},
        {"fence_idle": Treatment.SKIP},
        {"middle_active": Treatment.GLOBAL_Z},
        {"middle_idle": Treatment.FULL},
        {"budget": 0.11},
        {"selector": Selector.DEVIATION},
        {"deviation_layer": 5},
        {"global_heads": (1,)},
        {"fan_out": FanOutPolicy(tau=0.8)},
        {"fan_out": FanOutPolicy(k_min=4, tau=0.8)},
        {"fan_out": FanOutPolicy(tau=0.9)},
        {"protected": Protected(first_windows=2)},
        {"protected": Protected(last_windows=0)},
        {"protected": Protected(recent_tail=7)},
        {"protected": Protected(indexed_share=0.0)},
        {"prefix_cache": True},
    ]
    digests = {base.digest(), *(base.model_copy(update=change).digest() for change in changes)}
    assert len(digests) == 1 + len(changes)


def test_profiles_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        SHIPPED["turbo"].budget = 0.5  # type: ignore[misc]


SPLIT = {"middle_active": "global+z", "middle_idle": "global+z", "selector": "none"}


def test_a_profile_that_restores_nothing_is_none():
    """Rows become active only where the others skip."""
    with pytest.raises(ValueError, match="restores nothing"):
        Profile(
            name="p",
            middle_active=Treatment.GLOBAL_Z,
            middle_idle=Treatment.FULL,
            selector=Selector.NONE,
            budget=0,
            protected=Protected(indexed_share=0.0),
        )


def test_one_head_of_a_group_must_be_local():
    profile = Profile(name="p", middle_active=Treatment.GLOBAL_Z, global_heads=tuple(range(FLASH.heads_per_group)))
    assert misfit(profile, FLASH) == "all 8 heads of a group are Global, none is Local"


def test_the_deviation_baseline():
    """Its only rows inside documents are those that deviate most behind nano's first CSA layer; fences as rowsparse."""
    profile = load_profile(str(ROOT / "configs/profiles/deviation.json"))
    like = {name: getattr(SHIPPED["rowsparse"], name) for name in ("fence_layers", "fence_idle", "budget", "fan_out")}
    assert {name: getattr(profile, name) for name in like} == like
    assert (profile.selector, profile.deviation_layer) == (Selector.DEVIATION, 4)
    assert GEOMETRY.kinds.index(LayerKind.CSA) == profile.deviation_layer - 1
    assert profile.protected == Protected(first_windows=0, last_windows=0, recent_tail=0, indexed_share=0.0)
    assert profile.needs() == ("latents", "streams:1", "window_all")


FLASH = geometry_from_config(published_config("flash"))


@pytest.mark.parametrize("path", [path for path in FILES if path.stem.startswith("flash-")], ids=lambda path: path.stem)
def test_the_profiles_of_flash(path):
    """The shipped ones with three fence layers; the published recent tail belongs to ``combined``."""
    profile, like = load_profile(str(path)), SHIPPED[path.stem.removeprefix("flash-")]
    assert misfit(profile, FLASH) == ""
    assert profile.fence_layers == 3
    tail = 32768 if like.name == "combined" else 0
    protected = like.protected.model_copy(update={"recent_tail": tail})
    changes = {"name": profile.name, "fence_layers": 3, "protected": protected}
    assert profile == like.model_copy(update=changes)
    needs = {need.partition(":")[0] for need in like.needs()}
    assert {need.partition(":")[0] for need in profile.needs()} == needs
    # Published: 56 Local and 8 Global heads.
    assert len(profile.global_heads) * FLASH.o_groups == 8


def test_every_reusing_profile_has_a_flash_one():
    assert {f"flash-{name}" for name, profile in SHIPPED.items() if profile.reuses} <= {path.stem for path in FILES}


@pytest.mark.parametrize("name", ["fixed-3", "adaptive-80"])
def test_artifacts_of_rowsparse_serve_fewer_experts(name):
    assert load_profile(str(ROOT / f"configs/profiles/{name}.json")).needs() == SHIPPED["rowsparse"].needs()


@given(
    st.sampled_from(Selector),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from([0.0, 0.05]),
    st.integers(0, 1),
    st.sampled_from(Treatment),
)
def test_a_selector_that_picks_has_all_windows_to_read(selector, budget, share, last, idle):
    protected = Protected(indexed_share=share, last_windows=last)
    try:
        profile = Profile(name="p", selector=selector, budget=budget, protected=protected, middle_idle=idle)
    except ValidationError:
        return
    assert profile.picks_rows == (selector is not Selector.NONE and budget + share > 0)
    if profile.picks_rows:
        assert {"latents", "window_all"} <= set(profile.needs())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "Invalid JSON"),
        ("[]", "valid dictionary|object"),
        ({}, "name: Field required"),
        ({"name": "p", "bugdet": 0.1}, "bugdet: Extra inputs"),
        ({"name": "p", "protected": {"first": 1}}, "protected.first: Extra inputs"),
        ({"name": "P p"}, "name: String should match pattern"),
        ({"name": "p", "budget": 1.5}, "budget: Input should be less than or equal to 1"),
        ({"name": "p", "budget": -0.1}, "budget: Input should be greater than or equal to 0"),
        ({"name": "p", "fence_layers": -1}, "fence_layers"),
        ({"name": "p", "middle_idle": "slow"}, "middle_idle: Input should be 'full', 'global.z' or 'skip'"),
        ({"name": "p", "protected": {"first_windows": -1}}, "protected.first_windows"),
        ({"name": "p", "protected": {"indexed_share": 2}}, "protected.indexed_share"),
        ({"name": "p", "fan_out": {"k_min": 0}}, "fan_out.k_min"),
        ({"name": "p", "fan_out": {"tau": 0}}, "fan_out.tau"),
        ({"name": "p", "fan_out": {"k_min": 3}}, "fan_out.tau: Field required"),
        ({"name": "p", "prefix_cache": "perhaps"}, "prefix_cache: Input should be a valid boolean"),
        ({"name": "p", "prefix_cache": True}, "prefix_cache needs middle_idle full and no fan_out"),
        ({"name": "p", "global_heads": []}, "global_heads must name distinct positions"),
        ({"name": "p", "global_heads": [1, 1]}, "global_heads must name distinct positions"),
        ({"name": "p", "global_heads": [-1]}, "global_heads"),
        ({"name": "p", "fence_idle": "global+z"}, "fence_idle must be full or skip"),
        ({"name": "p", "middle_active": "skip"}, "active rows that skip need budget 0"),
        ({"name": "p", "selector": "none"}, "needs a selector"),
        ({"name": "p", "selector": "none", "budget": 0}, "needs a selector"),
        ({"name": "p", "middle_active": "global+z", "fence_layers": 0}, "at least one fence layer"),
        ({"name": "p", "selector": "random"}, "selector: Input should be 'none', 'indexer' or 'deviation'"),
        ({"name": "p", "deviation_layer": -1}, "deviation_layer: Input should be greater than or equal to 0"),
        ({"name": "p", "deviation_layer": 1.5}, "deviation_layer: Input should be a valid integer"),
        (
            {"name": "p", "middle_active": "global+z", "middle_idle": "global+z"},
            "selector indexer needs middle_idle skip",
        ),
        ({"name": "p", "middle_idle": "full", "selector": "deviation"}, "selector deviation needs middle_idle skip"),
        ({"name": "p", "middle_idle": "full", "budget": 0}, "selector indexer needs middle_idle skip"),
        ({"name": "p", **SPLIT, "fence_idle": "skip"}, "fence_idle skip needs middle_idle skip"),
        ({"name": "p", **SPLIT, "middle_idle": "full", "fence_idle": "skip"}, "fence_idle skip needs middle_idle skip"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_file_and_the_field(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(ConfigError, match=message) as error:
        load_profile(path)
    assert str(error.value).startswith(f"profile {path}: ")
    assert "\n" not in str(error.value)
    assert "Value error" not in str(error.value)  # pydantic's


def test_a_profile_that_does_not_exist_lists_those_that_do(tmp_path):
    for name in ("Turbo", "turb", str(tmp_path / "none.json"), str(tmp_path), ""):
        with pytest.raises(ConfigError, match="neither a file nor one of recompute, headsplit, combined") as error:
            load_profile(name)
        assert "\n" not in str(error.value)


def test_a_profile_that_is_not_text(tmp_path):
    (tmp_path / "p.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="not readable"):
        load_profile(str(tmp_path / "p.json"))
