"""What the Triton kernels share: rows of latents as tiles, rotation of a tile, products, rounding.

Unverified on hardware: seen working under Triton's interpreter, and compiled for sm_90, never run on a GPU. The
interpreter has no bf16 product and truncates where bf16 and fp8 round, so that what must be exact is arithmetic on bits
here, and ``product`` has a branch for it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redknot.ops.records import Records


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def operands(dtype: torch.dtype) -> str:
    """How products of inputs of ``dtype`` are made: float32 stays (IEEE), everything else is bf16 for tensor cores."""
    if dtype == torch.float32:
        return "fp32"
    return "bf16_emulated" if interpreted() else "bf16"


def source(keys: Tensor | Records) -> dict[str, Any]:
    """Arguments of ``load_rows`` for plain latents [N, d] or packed ones, and how many rows they have."""
    if isinstance(keys, Tensor):
        rows, columns = keys.stride()
        plain = {"data": keys, "data_page": rows, "data_row": 0, "data_column": columns, "rope": keys, "scales": keys}
        none = dict.fromkeys(("rope_page", "rope_row", "scale_page", "scale_row", "VALUES", "ROPE"), 0)
        return {**plain, **none, "capacity": keys.shape[0], "PAGE": 1, "KIND": "plain", "TILE": 1, "FP32_SCALES": False}
    layout, data, scales = keys.format, keys.data, keys.scales
    rope = keys.rope if layout.rope else data
    return {
        "data": data,
        "data_page": data.stride(0),
        "data_row": data.stride(1),
        "data_column": 1,
        "rope": rope,
        "rope_page": rope.stride(0),
        "rope_row": rope.stride(1),
        "scales": scales,
        "scale_page": scales.stride(0),
        "scale_row": scales.stride(1),
        "capacity": keys.capacity,
        "PAGE": keys.rows,
        "KIND": layout.element.value,
        "VALUES": layout.values,
        "ROPE": layout.rope,
        "TILE": layout.tile,
        "FP32_SCALES": layout.fp32_scales,
    }


def width(keys: Tensor | Records) -> int:
    """Channels of a row."""
    return keys.shape[1] if isinstance(keys, Tensor) else keys.format.width


@triton.jit
def load_rows(
    rows,
    seen,
    columns,
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
    D: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
    VALUES: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    FP32_SCALES: tl.constexpr,
):
    """Rows by number [n] as float32 [n, columns], zeros where ``seen`` [n] is not set or a column is past ``D``."""
    page, slot = (rows // PAGE).to(tl.int64), (rows % PAGE).to(tl.int64)
    inside = seen[:, None] & (columns < D)[None, :]
    start = (page * data_page + slot * data_row)[:, None]
    if KIND == "plain":
        at = columns.to(tl.int64) * data_column
        found = tl.load(data + start + at[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        quantised = inside & (columns < VALUES)[None, :]
        if KIND == "fp4":
            byte = tl.load(data + start + (columns // 2)[None, :], mask=quantised, other=0).to(tl.int32)
            found = from_e2m1((byte >> ((columns & 1) * 4)[None, :]) & 15)
        else:
            byte = tl.load(data + start + columns[None, :], mask=quantised, other=0)
            found = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        tiles = scales + (page * scale_page + slot * scale_row)[:, None] + (columns // TILE)[None, :]
        if FP32_SCALES:
            scale = tl.load(tiles, mask=quantised, other=0.0)
        else:
            scale = (tl.load(tiles, mask=quantised, other=0).to(tl.int32) << 23).to(tl.float32, bitcast=True)
        found = found * scale
        if ROPE > 0:
            behind = inside & (columns >= VALUES)[None, :]
            at = rope + (page * rope_page + slot * rope_row)[:, None] + (columns - VALUES)[None, :]
            found = tl.where(behind, tl.load(at, mask=behind, other=0.0).to(tl.float32), found)
    return found


@triton.jit
def from_e2m1(code):
    """e2m1 nibbles (int32) as float32."""
    size = code & 7
    exponent = ((size >> 1) + 126) << 23  # of 1 for the codes 2 and 3
    normal = (1.0 + 0.5 * (size & 1).to(tl.float32)) * exponent.to(tl.float32, bitcast=True)
    magnitude = tl.where(size < 2, 0.5 * size.to(tl.float32), normal)
    return tl.where(code > 7, -magnitude, magnitude)


@triton.jit
def turn(x, cos, sin, sign, M: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rotate the last 2 * HALF of D channels of ``x`` [M, BLOCK_D] by one row's angles; ``sign`` -1 turns back."""
    pair = tl.arange(0, BLOCK_D // 2) - (D // 2 - HALF)
    turned = (pair >= 0) & (pair < HALF)
    c = tl.load(cos + pair, mask=turned, other=1.0)[None, :]
    s = tl.load(sin + pair, mask=turned, other=0.0)[None, :] * sign
    even, odd = tl.split(tl.reshape(x, (M, BLOCK_D // 2, 2)))
    return tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (M, BLOCK_D))


@triton.jit
def bf16_bits(x):
    """The upper half of float32 ``x`` rounded to nearest even, as int32 below 2 ** 16; every NaN is one NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0) & 0xFFFF


@triton.jit
def product(a, b, OPERANDS: tl.constexpr):
    """Matrix product of float32 tiles, accumulated in float32, with operands in the precision asked for."""
    if OPERANDS == "bf16":
        found = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif OPERANDS == "bf16_emulated":
        a = (bf16_bits(a) << 16).to(tl.float32, bitcast=True)
        b = (bf16_bits(b) << 16).to(tl.float32, bitcast=True)
        found = tl.dot(a, b, input_precision="ieee")
    else:
        found = tl.dot(a, b, input_precision="ieee")
    return found
