"""Triton kernel of :mod:`redknot.ops.segment`: sparse attention over latents that stay packed. Unverified on hardware.

One program is one row and some of its heads; entries come in tiles, each dequantised once in registers and used twice,
as keys and as values, under an online softmax in float32. Rows of one segment share nothing but the cache: with 64
heads a row alone fills a tensor-core tile. Tiles before the first entry that exists and behind the last are not
computed: where rows choose entries of many segments in order, each segment's call costs its own share only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redknot.ops.attention import Partial
from redknot.ops.records import Records
from redknot.ops.rope import Rotation
from redknot.ops.tile_triton import load_rows, operands, product, source, turn

# Most heads of a program -> (entries in a tile, warps). A tile of 32 bf16 entries is 32 KB of shared memory. For sm_90
# the compiler spills registers in every shape (64 heads: 720 bytes a thread); which shape is fastest, a GPU has to say.
SHAPES = {16: (64, 4), 32: (32, 4), 64: (32, 8)}
FP32_SHAPES = {16: (16, 4)}  # of float32 queries: operands are twice as wide, and no tensor core takes them


def segment_attention(q: Tensor, rotation: Rotation | None, keys: Tensor | Records, indices: Tensor) -> Partial:
    """As :func:`redknot.ops.segment.segment_attention`."""
    rows, heads, d = q.shape
    found = Partial(q.new_empty(q.shape, dtype=torch.float32), q.new_empty(rows, heads, dtype=torch.float32))
    if not rows or not heads:
        return found
    shapes = FP32_SHAPES if q.dtype == torch.float32 else SHAPES
    block = min(max(triton.next_power_of_2(heads), 16), max(shapes))
    entries, warps = shapes[block]
    cos, sin = (q, q) if rotation is None else (rotation.cos.contiguous(), rotation.sin.contiguous())
    _attend[(rows, triton.cdiv(heads, block))](
        q,
        *q.stride(),
        cos,
        sin,
        indices,
        *indices.stride(),
        indices.shape[1],
        found.output,
        found.lse,
        heads,
        D=d,
        BLOCK_D=triton.next_power_of_2(d),
        BLOCK_H=block,
        BLOCK_N=entries,
        HALF=0 if rotation is None else cos.shape[1],
        OPERANDS=operands(q.dtype),
        **source(keys),
        num_warps=warps,
        num_stages=2,
    )
    return found


@triton.jit
def _attend(
    q,
    q_row,
    q_head,
    q_column,
    cos,
    sin,
    indices,
    index_row,
    index_column,
    count,
    output,
    lse,
    heads,
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
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
    OPERANDS: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
    VALUES: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    FP32_SCALES: tl.constexpr,
):
    """One program: BLOCK_H heads of one row; ``output`` [T, H, D] and ``lse`` [T, H] are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    columns = tl.arange(0, BLOCK_D)
    inside = (head < heads)[:, None] & (columns < D)[None, :]
    at = q + row * q_row + head.to(tl.int64)[:, None] * q_head + columns.to(tl.int64)[None, :] * q_column
    query = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if HALF > 0:
        query = turn(query, cos + row * HALF, sin + row * HALF, 1.0, BLOCK_H, D, HALF, BLOCK_D)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    summed = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    begin, end = tl.full((), 0, tl.int32) + count, tl.full((), 0, tl.int32)
    for first in range(0, count, BLOCK_N):
        number = first + tl.arange(0, BLOCK_N)
        chosen = indices + row * index_row + number.to(tl.int64) * index_column
        entry = tl.load(chosen, mask=number < count, other=-1)
        some = tl.max(((entry >= 0) & (entry < capacity)).to(tl.int32), 0) > 0
        begin = tl.where(some, tl.minimum(begin, first), begin)
        end = tl.where(some, first + BLOCK_N, end)
    for first in range(begin, end, BLOCK_N):
        number = first + tl.arange(0, BLOCK_N)
        chosen = indices + row * index_row + number.to(tl.int64) * index_column
        entry = tl.load(chosen, mask=number < count, other=-1)
        seen = (entry >= 0) & (entry < capacity)
        latents = load_rows(
            entry, seen, columns, data, data_page, data_row, data_column, rope, rope_page, rope_row, scales,
            scale_page, scale_row, D, PAGE, KIND, VALUES, ROPE, TILE, FP32_SCALES,
        )  # fmt: skip
        logits = product(query, tl.trans(latents), OPERANDS)
        logits = tl.where(seen[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(logits - safe[:, None])
        shrink = tl.exp(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        summed = summed * shrink[:, None] + product(weights, latents, OPERANDS)
        top = higher
    some = total > 0
    summed = summed / tl.where(some, total, 1.0)[:, None]
    if HALF > 0:
        summed = turn(summed, cos + row * HALF, sin + row * HALF, -1.0, BLOCK_H, D, HALF, BLOCK_D)
    into = row * heads + head
    tl.store(output + into[:, None] * D + columns[None, :], summed, mask=inside)
    tl.store(lse + into, tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf")), mask=head < heads)
