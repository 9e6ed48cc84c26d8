"""Head tables: what is one, what it is called, and files that are none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redknot.errors import ConfigError
from redknot.model import jsonfile
from redknot.model.heads import HeadTable, MeasuredHeads, fixed_table, load_heads, named_table
from redknot.model.profile import SHIPPED, Profile, load_profile, misfit
from tests.kit.heads import mixed_table
from tests.kit.tiny import geometry_of

NANO = geometry_of("nano")  # 4 layers, 2 groups of 2 heads
POSITIONS = [[[0], [1]], [[1], [0]], [[1], [1]], [[0], [0]]]
TABLE = HeadTable.model_validate({"heads_per_group": 2, "positions": POSITIONS})
ALL_DRIFTS = [[[0.5, 0.25], [0.0, 1.0]]] * 4
FILE: dict[str, Any] = {
    "format": "redknot-heads",
    "version": 1,
    "model": {"weights_hash": "a", "config_hash": "b", "tokenizer_hash": "c", "dtype": "float32"},
    "corpus": {"digest": "d", "documents": 3, "tokens": 30, "measured": 2, "rows": 20, "context": 9, "seed": 0},
    "table": {"heads_per_group": 2, "positions": POSITIONS},
    "remaining": {"fixed": 0.5, "table": 0.25},
    "drifts": ALL_DRIFTS,
}
SPLIT = {"name": "p", "middle_active": "global+z"}


def write(folder: Path, content: object, name: str = "heads.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@given(st.lists(st.integers(0, 7), min_size=1, max_size=7, unique=True), st.integers(1, 5))
def test_a_table_that_is_the_same_everywhere_is_the_fixed_choice(positions: list[int], fences: int) -> None:
    table = HeadTable.model_validate({"heads_per_group": 8, "positions": [[positions] * 3] * 11})
    fixed = Profile(name="p", middle_active="global+z", fence_layers=fences, global_heads=tuple(positions))
    same = fixed.model_copy(update={"global_heads": (0,), "head_table": table})
    assert same.needs() == fixed.needs()
    assert table.positions[0][0] == tuple(sorted(positions))
    assert same.global_per_group == fixed.global_per_group == table.per_group == len(positions)


@given(st.integers(0, 2**20), st.integers(1, 7), st.integers(0, 5))
def test_tables_have_the_same_name_where_they_agree_between_the_fences(seed: int, count: int, fences: int) -> None:
    def table(layers: list[Any]) -> HeadTable:
        return HeadTable.model_validate({"heads_per_group": 8, "positions": layers})

    wide = geometry_of("flash")
    several = [mixed_table(wide, 1, seed + number).positions for number in range(4)]
    layers = [layer for part in several for layer in part]
    narrow = len(mixed_table(wide).positions[0])
    assert narrow == wide.o_groups
    one = table(layers)
    ends = [*[((count % 8,),) * narrow] * fences, *layers[fences : len(layers) - fences]]
    other = table([*ends, *[((count % 8,),) * narrow] * fences])
    assert one.name(fences) == other.name(fences)
    moved = [list(map(list, layer)) for layer in layers]
    moved[5 if fences < 6 else 6][0] = [(layers[5][0][0] + 1) % 8]
    assert fences > 5 or table(moved).name(fences) != one.name(fences)


def test_a_name_leads_back_to_its_table() -> None:
    for positions in ((0,), (1,)):
        fixed = fixed_table(NANO, positions)
        assert named_table(fixed.name(1), 1, NANO, None) == fixed
    assert named_table(TABLE.name(1), 1, NANO, TABLE) is TABLE
    other = mixed_table(geometry_of("flash"))
    for wrong in (None, other, fixed_table(NANO, (0,))):
        with pytest.raises(ValueError, match="which is not the one given"):
            named_table(TABLE.name(1), 1, NANO, wrong)


def test_a_profile_names_its_table_by_content(tmp_path: Path) -> None:
    write(tmp_path, FILE)
    by_path = load_profile(str(write(tmp_path, SPLIT | {"head_table": "heads.json"}, "p.json")))
    inline = load_profile(str(write(tmp_path, SPLIT | {"head_table": FILE["table"]}, "q.json")))
    assert by_path == inline
    assert by_path.digest() == inline.digest() != Profile(**SPLIT).digest()
    assert by_path.head_table == TABLE
    assert by_path.heads(NANO) is by_path.head_table
    (need,) = [need for need in by_path.needs() if need.startswith("zl:")]
    assert need == f"zl:1:{TABLE.name(1)}"
    assert len(need) == len("zl:1:table-") + 32
    # A profile that is dumped holds its table, and is the same one when it is read again.
    assert load_profile(str(write(tmp_path, by_path.model_dump_json(), "r.json"))) == by_path


def test_a_table_of_another_geometry_is_refused() -> None:
    profile = Profile(**SPLIT, head_table=TABLE)
    assert misfit(profile, NANO) == ""
    problem = misfit(profile, geometry_of("flash"))
    assert problem == (
        "the head table is of a model of 4 layers, 2 groups of 2 heads; this one has 3 layers, 2 groups of 2 heads"
    )
    every = HeadTable.model_validate({"heads_per_group": 2, "positions": [[[0, 1], [0, 1]]] * 4})
    assert "none is Local" in misfit(profile.model_copy(update={"head_table": every}), NANO)
    assert misfit(SHIPPED["headsplit"], NANO) == ""


def changed(**parts: Any) -> dict[str, Any]:
    return FILE | {"table": FILE["table"] | parts}


def first(group: object) -> dict[str, Any]:
    """The file with another first group."""
    return changed(positions=[[group, [1]], *POSITIONS[1:]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Invalid JSON"),
        ("[" * 100_000, "Invalid JSON"),
        ([], "valid dictionary|object"),
        ({}, "model: Field required"),
        (FILE | {"format": "other"}, "format: Input should be 'redknot-heads'"),
        (FILE | {"version": 2}, "version: Input should be 1"),
        (FILE | {"more": 1}, "more: Extra inputs"),
        (changed(positions=[]), "table.positions"),
        (changed(positions=[[]] * 4), "table.positions.0"),
        (changed(positions=POSITIONS[:3]), "drifts are not those of 3 layers"),
        (changed(positions=[*POSITIONS[:3], [[0]]]), "table: layer 3 has 1 groups, layer 0 has 2"),
        (changed(positions=[*POSITIONS[:3], [[0], [0, 1]]]), "table: layer 3, group 1: 2 Global heads"),
        (changed(heads_per_group=0), "table.heads_per_group"),
        (changed(heads_per_group=3), "drifts are not those of 4 layers, 2 groups of 3 heads"),
        (changed(heads_per_group=10**30), "table.heads_per_group"),
        (changed(heads_per_group=True), "table.heads_per_group"),
        (first([]), "table.positions.0.0"),
        (first([0, 0]), "table: layer 0, group 0: a head is named twice|2 Global heads"),
        (first([2]), "table: layer 0, group 0: Global head 2 in groups of 2 heads"),
        (first([-1]), "table.positions.0.0.0: Input should be greater than or equal to 0"),
        (first([10**30]), "table.positions.0.0.0"),
        (first([0.5]), "table.positions.0.0.0"),
        (first(["0"]), "table.positions.0.0.0"),
        (first([True]), "table.positions.0.0.0"),
        (first(0), "table.positions.0.0"),
        (FILE | {"drifts": []}, "drifts are not those of 4 layers"),
        (FILE | {"drifts": ALL_DRIFTS[:3]}, "drifts are not those of 4 layers"),
        (FILE | {"drifts": [[[0.5], [0.5]]] * 4}, "drifts are not those of"),
        (FILE | {"drifts": [[[math.nan, 0.1], [0, 0]]] * 4}, "drifts.0.0.0"),
        (FILE | {"drifts": [[[math.inf, 0.1], [0, 0]]] * 4}, "drifts.0.0.0"),
        (FILE | {"drifts": [[[-0.1, 0.1], [0, 0]]] * 4}, "drifts.0.0.0"),
        (FILE | {"remaining": {"fixed": math.nan, "table": 0}}, "remaining.fixed"),
        (FILE | {"corpus": FILE["corpus"] | {"measured": 0}}, "corpus.measured"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, content: object, message: str) -> None:
    path = write(tmp_path, content)
    profile = write(tmp_path, SPLIT | {"head_table": "heads.json"}, "p.json")
    for load in (lambda: load_heads(path), lambda: load_profile(str(profile))):
        with pytest.raises(ConfigError, match=message) as error:
            load()
        assert str(error.value).startswith(f"head table {path}: ")
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 400


def test_files_that_are_not_there_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("none.json", "", ".", "a\0b"):
        profile = write(tmp_path, SPLIT | {"head_table": name}, "p.json")
        with pytest.raises(ConfigError, match=r"there is no such file; `redknot profile-heads` makes one"):
            load_profile(str(profile))
    monkeypatch.setattr(jsonfile, "MAX_BYTES", 10)
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        load_heads(write(tmp_path, FILE))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"global_heads": [1], "head_table": FILE["table"]}, "head_table takes the place of global_heads"),
        ({"head_table": 3}, "head_table: Input should be"),
        ({"head_table": POSITIONS}, "head_table: Input should be"),
        ({"head_table": FILE["table"] | {"positions": [[[2], [0]]]}}, "head_table: layer 0, group 0: Global head 2"),
    ],
)
def test_what_is_wrong_with_a_profile_of_a_table(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    path = write(tmp_path, SPLIT | more, "p.json")
    with pytest.raises(ConfigError, match=message) as error:
        load_profile(str(path))
    assert str(error.value).startswith(f"profile {path}: ")


def test_a_path_needs_a_file_to_start_from() -> None:
    with pytest.raises(ValueError, match="only a profile in a file may name a head table by its path"):
        Profile(**SPLIT, head_table="heads.json")


def test_measured_heads_are_what_they_were_when_they_are_read_again(tmp_path: Path) -> None:
    found = MeasuredHeads.model_validate(FILE)
    assert load_heads(write(tmp_path, found.model_dump_json())) == found
