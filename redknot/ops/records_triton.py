"""Triton kernels of :mod:`redknot.ops.records`: pages of bytes packed and unpacked. Unverified on hardware."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redknot.ops.records import MOST, SMALLEST, Records
from redknot.ops.tile_triton import bf16_bits, load_rows, source

ROWS = 8  # rows that one program unpacks


def unpack(records: Records, rows: Tensor) -> Tensor:
    """As :func:`redknot.ops.records.unpack`."""
    found = torch.empty(len(rows), records.format.width, device=rows.device)
    if len(rows):
        d = records.format.width
        _unpack[(triton.cdiv(len(rows), ROWS),)](
            found,
            rows,
            rows.stride(0),
            len(rows),
            D=d,
            BLOCK_D=triton.next_power_of_2(d),
            ROWS=ROWS,
            **source(records),
            num_warps=4,
        )
    return found


def pack_(records: Records, rows: Tensor, values: Tensor) -> None:
    """As :func:`redknot.ops.records.pack_`."""
    layout, data, scales = records.format, records.data, records.scales
    rope = records.rope.view(torch.int16) if layout.rope else data
    tiles = layout.values // layout.tile
    if not len(rows):
        return
    _pack[(len(rows), tiles + bool(layout.rope))](
        values,
        *values.stride(),
        rows,
        rows.stride(0),
        data,
        *data.stride()[:2],
        rope,
        *rope.stride()[:2],
        scales,
        *scales.stride()[:2],
        records.capacity,
        PAGE=records.rows,
        VALUES=layout.values,
        ROPE=layout.rope,
        BLOCK_ROPE=triton.next_power_of_2(max(layout.rope, 1)),
        TILE=layout.tile,
        TILES=tiles,
        FP4=layout.element == "fp4",
        FP32_SCALES=layout.fp32_scales,
        MOST=MOST[layout.element],
        SMALLEST=SMALLEST,
        num_warps=1,
    )


@triton.jit
def _unpack(
    found,
    rows,
    rows_stride,
    count,
    data,
    data_page,
    data_row,
    data_column,
    rope,
    rope_page,
    rope_row,
    scales,
    scale_page,
    scale_row,
    capacity,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
    VALUES: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    FP32_SCALES: tl.constexpr,
):
    """One program: ROWS rows."""
    number = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    row = tl.load(rows + number * rows_stride, mask=number < count, other=-1)
    seen = (row >= 0) & (row < capacity)
    tile = load_rows(
        row, seen, columns, data, data_page, data_row, data_column, rope, rope_page, rope_row, scales, scale_page,
        scale_row, D, PAGE, KIND, VALUES, ROPE, TILE, FP32_SCALES,
    )  # fmt: skip
    inside = (number < count)[:, None] & (columns < D)[None, :]
    tl.store(found + number[:, None] * D + columns[None, :], tile, mask=inside)


@triton.jit
def _pack(
    values,
    values_row,
    values_column,
    rows,
    rows_stride,
    data,
    data_page,
    data_row,
    rope,
    rope_page,
    rope_row,
    scales,
    scale_page,
    scale_row,
    capacity,
    PAGE: tl.constexpr,
    VALUES: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    FP4: tl.constexpr,
    FP32_SCALES: tl.constexpr,
    MOST: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """One program: one tile of one row, or its RoPE channels."""
    number, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + number * rows_stride).to(tl.int64)
    if (row >= 0) & (row < capacity):
        page, slot = row // PAGE, row % PAGE
        taken = values + number * values_row
        if part < TILES:
            columns = part * TILE + tl.arange(0, TILE)
            x = tl.load(taken + columns.to(tl.int64) * values_column).to(tl.float32)
            largest = tl.max(tl.abs(x), 0)
            if FP4:
                scale = tl.maximum(tl.div_rn(largest, MOST), SMALLEST)
            else:
                scale = tl.div_rn(tl.maximum(largest, SMALLEST), MOST)
            beside = scales + page * scale_page + slot * scale_row + part
            if FP32_SCALES:
                tl.store(beside, scale)
            else:
                bits = scale.to(tl.int32, bitcast=True)
                exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
                tl.store(beside, exponent.to(tl.uint8))
                scale = (exponent << 23).to(tl.float32, bitcast=True)
            into = data + page * data_page + slot * data_row
            if FP4:
                pair = part * (TILE // 2) + tl.arange(0, TILE // 2)
                at = taken + (2 * pair).to(tl.int64) * values_column
                low = _e2m1(tl.div_rn(tl.load(at).to(tl.float32), scale))
                high = _e2m1(tl.div_rn(tl.load(at + values_column).to(tl.float32), scale))
                tl.store(into + pair, (low | (high << 4)).to(tl.uint8))
            else:
                tl.store(into + columns, _e4m3(tl.div_rn(x, scale)).to(tl.uint8))
        elif ROPE > 0:
            turned = tl.arange(0, BLOCK_ROPE)  # names of their own: a branch may not give a name another type
            present = turned < ROPE
            x_rope = tl.load(taken + (VALUES + turned).to(tl.int64) * values_column, mask=present, other=0.0)
            halves = bf16_bits(x_rope.to(tl.float32)).to(tl.int16)
            tl.store(rope + page * rope_page + slot * rope_row + turned, halves, mask=present)


@triton.jit
def _e4m3(x):
    """e4m3 codes (int32) of float32 ``x``, rounded to nearest even and cut at 448.

    In units of the last place the magnitude is a whole number from 0 to 16, and the code is that number behind eight
    for every exponent above the smallest: carries and subnormal numbers need no case of their own.
    """
    magnitude = tl.minimum(tl.abs(x), 448.0)
    exponent = tl.maximum((magnitude.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    units = magnitude * ((130 - exponent) << 23).to(tl.float32, bitcast=True)  # exact: by a power of two
    whole = (units + 8388608.0) - 8388608.0  # to nearest even: 2 ** 23 leaves no bit for a fraction
    code = (exponent + 6) * 8 + whole.to(tl.int32)
    return tl.where(x.to(tl.int32, bitcast=True) < 0, code | 0x80, code)


@triton.jit
def _e2m1(x):
    """e2m1 codes (int32) of float32 ``x`` in units of its scale; the cuts are those of ``records.FP4_CUTS``."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size > 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size > 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size > 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return tl.where((x < 0) & (code > 0), code | 8, code)
