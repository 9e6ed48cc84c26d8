"""Packed rows moved to other positions: what is written, what is left, and how often a value is rounded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from redknot.errors import ConfigError
from redknot.ops.hadamard import hadamard
from redknot.ops.records import V4_INDEX_FP8, V4_RECORD, Quantised, Records, RowFormat, pack_, split_pages, unpack
from redknot.ops.relocate import Stored, relocate_
from redknot.ops.rope import Rotation, rotate, rotation_at

SMALL = RowFormat(Quantised.FP8, values=32, tile=16, fp32_scales=False, rope=4)
FREQUENCIES = torch.tensor([1.0, 0.01])


def pages(row_format: RowFormat, rows: int, count: int) -> Records:
    """Every byte is 0xA5 at first."""
    nbytes = rows * (row_format.data_bytes + 8)
    return split_pages(torch.full((count, nbytes), 0xA5, dtype=torch.uint8), row_format, rows)


def filled(row_format: RowFormat, seed: int = 0) -> Records:
    records = pages(row_format, 3, 2)
    pack_(records, torch.arange(6), torch.randn(6, row_format.width, generator=torch.Generator().manual_seed(seed)))
    return records


@given(st.lists(st.tuples(st.integers(-2, 8), st.integers(-2, 9)), max_size=6, unique_by=lambda pair: pair[1]))
def test_what_is_outside_is_skipped_and_nothing_else_changes(pairs):
    source, target = filled(SMALL), pages(SMALL, 4, 2)
    rows, slots = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    rotation = rotation_at(torch.arange(len(pairs)) * 100 - 200, FREQUENCIES)
    seen = (rows >= 0) & (rows < 6) & (slots >= 0) & (slots < 8)
    assert relocate_(Stored(source), rows, rotation, Stored(target), slots) == int(seen.sum())
    wanted = pages(SMALL, 4, 2)
    turned = rotate(unpack(source, rows[seen]), Rotation(rotation.cos[seen], rotation.sin[seen]))
    pack_(wanted, slots[seen], turned)
    assert torch.equal(target.pages, wanted.pages)


@given(st.integers(-(10**6), 10**6))
def test_one_turn_for_all_is_that_turn_for_each(distance):
    targets = pages(SMALL, 6, 1), pages(SMALL, 6, 1)
    for target, count in zip(targets, (1, 6), strict=True):
        turn = rotation_at(torch.full((count,), distance), FREQUENCIES)
        assert relocate_(Stored(filled(SMALL)), torch.arange(6), turn, Stored(target), torch.arange(6)) == 6
    assert torch.equal(targets[0].pages, targets[1].pages)


def test_without_a_turn_the_bytes_are_the_same_and_nothing_is_rewritten():
    source, target = filled(V4_RECORD), pages(V4_RECORD, 2, 3)
    assert relocate_(Stored(source), torch.tensor([5, 0]), None, Stored(target), torch.tensor([1, 4])) == 0
    for name in ("data", "scales", "rope"):
        held, found = getattr(source, name), getattr(target, name)
        assert torch.equal(held[1, 2], found[0, 1])
        assert torch.equal(held[0, 0], found[2, 0])
    assert int((target.pages != 0xA5).sum()) <= 2 * 583  # the padding byte of a record is nobody's


def test_another_transform_is_a_rewrite():
    source, target = filled(V4_INDEX_FP8), pages(V4_INDEX_FP8, 6, 1)
    numbers = torch.arange(6)
    assert relocate_(Stored(source), numbers, None, Stored(target, transformed=True), numbers) == 6
    wanted = pages(V4_INDEX_FP8, 6, 1)
    pack_(wanted, numbers, hadamard(unpack(source, numbers)))
    assert torch.equal(target.pages, wanted.pages)


def test_transformed_rows_turn_in_their_own_channels():
    """Undone, turned, done again: not turned as they lie."""
    keys = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
    source, target, numbers = pages(V4_INDEX_FP8, 4, 1), pages(V4_INDEX_FP8, 4, 1), torch.arange(4)
    pack_(source, numbers, hadamard(keys))
    turn = rotation_at(torch.full((4,), 777), torch.linspace(0.001, 1, 32))
    assert relocate_(Stored(source, True), numbers, turn, Stored(target, True), numbers) == 4
    found, wanted = hadamard(unpack(target, numbers)), rotate(keys, turn)
    assert float((found - wanted).abs().max()) < 0.15 * float(wanted.abs().max())
    assert float((hadamard(rotate(hadamard(keys), turn)) - wanted).abs().max()) > float(wanted.abs().max()) / 2


def turn(count: int, channels: int = 4) -> Rotation:
    return Rotation(torch.ones(count, channels // 2), torch.zeros(count, channels // 2))


@pytest.mark.parametrize(
    ("rows", "rotation", "slots", "target", "said"),
    [
        (torch.arange(2), None, torch.arange(2), V4_RECORD, "36 channels do not fit into 512"),
        (torch.arange(2), None, torch.arange(3), SMALL, "not one list each"),
        (torch.zeros(1, 2).long(), None, torch.zeros(1, 2).long(), SMALL, "not one list each"),
        (torch.arange(3), turn(2), torch.arange(3), SMALL, "2 angles for 3 rows"),
        (torch.arange(2), turn(2, 38), torch.arange(2), SMALL, "38 channels to turn in rows of 36"),
    ],
)
def test_what_does_not_fit_is_refused(rows: Tensor, rotation, slots: Tensor, target: RowFormat, said: str):
    to = pages(target, 4, 1)
    with pytest.raises(ConfigError, match=f"^relocate: .*{said}"):
        relocate_(Stored(filled(SMALL)), rows, rotation, Stored(to), slots)
    assert bool((to.pages == 0xA5).all())
