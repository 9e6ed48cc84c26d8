"""Names, and names that are refused."""

from pathlib import Path

import pytest

from redknot.artifact.schema import (
    Section,
    boundary_section,
    file_of,
    generation_dir,
    layer_section,
    need_is_sharded,
    parse_generation,
    parse_section,
    shard_section,
)
from redknot.errors import StoreError


@pytest.mark.parametrize(
    ("name", "section", "file"),
    [
        (layer_section(0, "entries"), Section("layers", "entries", 0), "latents.0-3.safetensors"),
        (layer_section(42, "index_keys"), Section("layers", "index_keys", 42), "latents.40-43.safetensors"),
        (shard_section(3, "zl", 0, 2), Section("layers", "zl", 3, 0, 2), "zl.0-3.r0of2.safetensors"),
        (shard_section(4, "zl", 7, 8), Section("layers", "zl", 4, 7, 8), "zl.4-7.r7of8.safetensors"),
        (boundary_section("streams"), Section("boundary", "streams"), "boundary.safetensors"),
    ],
)
def test_names(name: str, section: Section, file: str) -> None:
    assert parse_section(name) == section
    assert file_of(section, 4) == file


@pytest.mark.parametrize(
    "name",
    [
        "",
        "layers.3",
        "layers.-1.x",
        "layers.03.x",
        "layers.3.../x",
        "layers.3.x.r2of2",
        "layers.3.x.r0of0",
        "boundary.../../etc/passwd",
        "boundary.x.r0of2",
        "boundary.layers.1.x",
        "controller.x",
        "/etc/passwd",
        "layers.3.x\n",
        "other.x",
        "layers.99999999.x",
    ],
)
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(StoreError, match="not a section name"):
        parse_section(name)


def test_directories() -> None:
    identifier = "ab" * 32
    assert generation_dir(Path("/s"), identifier, 3) == Path(f"/s/objects/ab/{identifier}/g3")
    assert parse_generation("g12") == 12
    assert [parse_generation(bad) for bad in ("g0", "g-1", "12", "g1x", "g01")] == [None] * 5
    for bad in ("../" * 21 + "x", "AB" * 32, "ab"):
        with pytest.raises(StoreError, match="not an artifact id"):
            generation_dir(Path("/s"), bad, 1)


def test_sharded_needs() -> None:
    assert need_is_sharded("zl")
    assert need_is_sharded("zl:1f")
    assert not need_is_sharded("zlx")
    assert not need_is_sharded("latents")
