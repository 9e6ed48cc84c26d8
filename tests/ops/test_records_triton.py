"""Packed rows: the kernel's bytes are the reference's, whose layout is SGLang's; hostile pages and numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redknot.errors import ConfigError
from redknot.latents.formats import FP8, FP8_INDEX8, Precision
from redknot.latents.layout import model_layout
from redknot.model.geometry import LayerKind, geometry_from_config
from redknot.model.published import published_config
from redknot.ops import records as reference
from redknot.ops.records import V4_INDEX_FP4, V4_INDEX_FP8, V4_RECORD, Quantised, Records, RowFormat, split_pages
from tests.kit.kernels import DEVICE, integers, poisoned_pages, random, strided

from redknot.ops import records_triton as kernel  # isort: skip  # after the kit, which knows whether it can be

SMALL = RowFormat(Quantised.FP8, values=32, tile=16, fp32_scales=False, rope=4)
FORMATS = [V4_RECORD, V4_INDEX_FP8, V4_INDEX_FP4, SMALL]


def same(one: Records, other: Records) -> bool:
    return torch.equal(one.pages, other.pages)


def magnitudes(rows: int, width: int, seed: int) -> Tensor:
    """Values over the whole range that is stored: zeros, ties of both elements, large and tiny tiles."""
    values = random(rows, width, seed=seed) * 10.0 ** integers(-9, 5, rows, 1, seed=seed)
    values[integers(0, 8, rows, width, seed=seed + 1) == 0] = 0.0
    return values


@pytest.mark.parametrize("row_format", FORMATS)
@given(rows=st.integers(0, 9), seed=st.integers(0, 10**6), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=4)
def test_bytes_are_the_references(row_format: RowFormat, rows: int, seed: int, dtype: torch.dtype) -> None:
    """Every byte: those of the rows, and the padding and the other rows, which stay. Then back, exactly."""
    values = strided(magnitudes(rows, row_format.width, seed).to(dtype))
    pages = [poisoned_pages(row_format, 3, 4) for _ in range(2)]
    numbers = torch.randperm(12, generator=torch.Generator().manual_seed(seed))[:rows].to(DEVICE)
    outside = integers(0, 4, rows, seed=seed) == 0
    numbers = strided(torch.where(outside, torch.tensor([-1, 12, -(2**40), 2**40] * 3)[:rows].to(DEVICE), numbers))
    kernel.pack_(pages[0], numbers, values)
    reference.pack_(pages[1], numbers, values)
    assert same(*pages)
    found = kernel.unpack(pages[0], numbers)
    expected = reference.unpack(pages[1], numbers)
    assert torch.equal(found, expected)
    assert not found.isnan().any()
    assert torch.equal(found[outside], torch.zeros_like(found[outside]))
    # What a format can hold survives a second round unchanged.
    kernel.pack_(pages[0], numbers, found)
    assert torch.equal(kernel.unpack(pages[0], numbers), found)


@pytest.mark.parametrize("fp32_scales", [False, True])
def test_every_e4m3_value_and_every_tie(fp32_scales: bool) -> None:
    """A tile whose largest value is 448 has scale 1: codes come back as they are, ties go to the even code."""
    layout = RowFormat(Quantised.FP8, values=256, tile=256, fp32_scales=fp32_scales)
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[:-1] + codes[1:]) / 2
    near = torch.cat((ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(448.0))))
    values = torch.zeros(3, 256)
    values[0, :127], values[0, 127:254] = codes, -codes
    values[1, :126], values[1, 126:252], values[2, :252] = ties, -ties, near
    values[:, 255] = 448.0
    pages = [split_pages(torch.zeros(1, 3 * 264, dtype=torch.uint8, device=DEVICE), layout, 3) for _ in range(2)]
    numbers = torch.arange(3, device=DEVICE)
    kernel.pack_(pages[0], numbers, values.to(DEVICE))
    reference.pack_(pages[1], numbers, values.to(DEVICE))
    assert same(*pages)
    assert torch.equal(kernel.unpack(pages[0], numbers)[0].cpu(), values[0])


def test_every_e2m1_code_and_every_tie() -> None:
    cuts = torch.tensor(reference.FP4_CUTS)
    values = torch.zeros(1, 128)
    values[0, 32:39], values[0, 39:46], values[0, 64:71] = cuts, -cuts, cuts.nextafter(torch.tensor(9.0))
    values[0, :8] = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values[0, 8:16] = -values[0, :8]
    values[0, [63, 95]] = 6.0
    pages = [split_pages(torch.zeros(1, 68, dtype=torch.uint8, device=DEVICE), V4_INDEX_FP4, 1) for _ in range(2)]
    number = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    kernel.pack_(pages[0], number, values.to(DEVICE))
    reference.pack_(pages[1], number, values.to(DEVICE))
    assert same(*pages)
    back = kernel.unpack(pages[0], number).cpu()
    assert torch.equal(back[0, :32], values[0, :32])
    assert back[0, 32:39].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4]  # a tie goes down
    assert back[0, 64:71].tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]


@given(st.integers(0, 10**6))
@settings(max_examples=5)
def test_round_trip_error_is_the_formats(seed: int) -> None:
    """Half a last place: 2^-4 of a value in e4m3 (or half its smallest step), and bf16 for RoPE."""
    values = magnitudes(4, V4_RECORD.width, seed)
    pages = poisoned_pages(V4_RECORD, 4, 1)
    kernel.pack_(pages, torch.arange(4, device=DEVICE), values)
    back = kernel.unpack(pages, torch.arange(4, device=DEVICE))
    tiles = values[:, :448].unflatten(1, (7, 64)).abs().amax(-1).clamp_min(reference.SMALLEST).repeat_interleave(64, 1)
    # A scale is below twice what the largest value needs, so the smallest step is below 2^-9 * 2 / 448 of it.
    allowed = torch.maximum(values[:, :448].abs() / 16, tiles * 2**-9 / 448)
    assert bool(((back[:, :448] - values[:, :448]).abs() <= allowed).all())
    assert torch.equal(back[:, 448:], values[:, 448:].bfloat16().float())


@pytest.mark.parametrize(("precision", "index"), [(FP8, V4_INDEX_FP4), (FP8_INDEX8, V4_INDEX_FP8)])
def test_formats_are_those_of_the_layout(precision: Precision, index: RowFormat) -> None:
    """The bytes that latents/layout.py counts, and SGLang's addresses (KVLayout.row_addressing) in its pages."""
    layout = model_layout(geometry_from_config(published_config("flash")), precision)
    pages = layout.pages()[LayerKind.CSA]
    for store, row_format, rows in (("window", V4_RECORD, 256), ("entries", V4_RECORD, 64), ("index", index, 64)):
        data, scales = pages[store].regions
        made = split_pages(torch.zeros(2, pages[store].nbytes, dtype=torch.uint8), row_format, rows)
        assert (made.data_offset, made.data_stride) == (data.offset, data.row.nbytes)
        assert (made.scale_offset, made.scale_stride) == (scales.offset, scales.row.nbytes)
        assert made.rows == data.rows
    assert V4_RECORD.data_bytes + 8 == 584


def test_pages_that_cannot_be_read_are_refused() -> None:
    def pages(nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.zeros(2, nbytes, dtype=dtype)

    for wrong, text in (
        (lambda: split_pages(pages(582), V4_RECORD, 1), "do not fit"),
        (lambda: split_pages(pages(585), V4_RECORD, 1), "cut by their address"),
        (lambda: split_pages(pages(584, torch.int8), V4_RECORD, 1), "uint8"),
        (lambda: split_pages(pages(1168)[:, ::2], V4_RECORD, 1), "contiguous bytes"),
        (lambda: split_pages(pages(588).flatten()[1:-3].view(2, -1), V4_RECORD, 1), "cut by their address"),
        (lambda: split_pages(pages(134), V4_INDEX_FP8, 1), "cut by their address"),
        (lambda: Records(pages(2000), V4_RECORD, 2, 0, 574, 1900, 8), "do not fit"),
        (lambda: RowFormat(Quantised.FP8, 448, 48, False), "powers of two"),
        (lambda: RowFormat(Quantised.FP4, 128, 64, False), "for each 32"),
        (lambda: RowFormat(Quantised.FP8, 64, 64, False, rope=3), "not pairs"),
    ):
        with pytest.raises(ConfigError, match=text):
            wrong()


def test_no_pages_at_all() -> None:
    empty = split_pages(torch.zeros(0, 584, dtype=torch.uint8, device=DEVICE), V4_RECORD, 1)
    numbers = torch.tensor([0, -1, 3], device=DEVICE)
    kernel.pack_(empty, numbers, random(3, 512))
    assert torch.equal(kernel.unpack(empty, numbers), torch.zeros(3, 512, device=DEVICE))
    assert torch.equal(reference.unpack(empty, numbers), torch.zeros(3, 512, device=DEVICE))
