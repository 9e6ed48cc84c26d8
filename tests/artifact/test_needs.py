"""The words for window rows: what serves what, which artifact comes first, and how a strategy is written."""

from __future__ import annotations

import pytest

from redknot.artifact.needs import Windows, lacking, parse_needs, parse_strategy, stored_windows
from redknot.artifact.sections import checkpoint_section, read_specs, section_specs
from redknot.errors import ConfigError
from redknot.nano.parameters import GEOMETRY

TAIL, EVERY = ("latents", "window_tail"), ("latents", "window_all")


@pytest.mark.parametrize("text", ["all", "none", "checkpoints:1", "checkpoints:999999"])
def test_strategies_are_written_as_they_are_read(text: str) -> None:
    windows = parse_strategy(text)
    assert str(windows) == text
    assert stored_windows([windows.need]) == windows


@pytest.mark.parametrize(
    "text",
    ["", "tail", "ALL", "none:1", "checkpoints", "checkpoints:0", "checkpoints:01", "checkpoints:1000000", "all "],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be all, none or checkpoints:K"):
        parse_strategy(text)


@pytest.mark.parametrize(
    ("wanted", "held", "missing"),
    [
        (TAIL, TAIL, ()),
        (TAIL, ("latents", "window_none"), ()),
        (TAIL, ("latents", "window_checkpoints:3"), ()),
        (TAIL, ("latents", "window_checkpoints:0"), ("window_tail",)),
        (TAIL, ("latents",), ("window_tail",)),
        (TAIL, ("window_none",), ("latents",)),
        (EVERY, ("latents", "window_none"), ("window_all",)),
        (EVERY, ("latents", "window_checkpoints:1"), ("window_all",)),
        (EVERY, (*EVERY, "window_tail"), ()),
        (("zl:1:0",), ("latents", "window_none"), ("zl:1:0",)),
    ],
)
def test_what_an_artifact_lacks(wanted: tuple[str, ...], held: tuple[str, ...], missing: tuple[str, ...]) -> None:
    assert lacking(wanted, held) == missing


def test_the_least_to_compute_comes_first() -> None:
    order = ["window_all", "window_checkpoints:1", "window_checkpoints:4", "window_none", "window_tail"]
    ranks = [stored_windows([need]).rank for need in order]
    assert ranks == sorted(set(ranks))
    assert [stored_windows([need]).serve_parts for need in order] == [True, True, True, True, False]
    assert str(parse_needs(("latents",)).windows) == "tail"


def test_sections_of_each_strategy() -> None:
    """Without a window section of a layer; checkpoints are one section each, and a request reads those it begins at."""
    layers, window, d = GEOMETRY.num_layers, GEOMETRY.window, GEOMETRY.head_dim
    tail = section_specs(GEOMETRY, 300, TAIL)
    bare = section_specs(GEOMETRY, 300, ("latents", "window_none"))
    assert bare == {name: spec for name, spec in tail.items() if not name.endswith(".window")}
    held = ("latents", "window_checkpoints:4")
    kept = section_specs(GEOMETRY, 300, held)
    assert {name: spec for name, spec in kept.items() if name not in bare} == {
        f"boundary.windows_{at}": ("F32", (layers, window, d)) for at in (128, 256)
    }
    assert read_specs(GEOMETRY, 300, TAIL, held, 1, [256, 0]).keys() - bare.keys() == {checkpoint_section(256)}
    assert read_specs(GEOMETRY, 300, TAIL, ("latents", "window_none"), 1, [0]) == bare
    assert read_specs(GEOMETRY, 300, TAIL, TAIL, 1, []) == tail
    assert read_specs(GEOMETRY, 300, TAIL, (*EVERY, "window_tail"), 1, []) == section_specs(GEOMETRY, 300, EVERY)
    assert Windows(parse_strategy("all").kind).describe(32, 32) == "all rows"
