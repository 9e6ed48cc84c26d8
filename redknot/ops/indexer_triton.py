"""Triton kernel of the indexer's scores over keys that stay in place, plain or packed. Unverified on hardware."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redknot.ops.records import Records
from redknot.ops.rope import Rotation
from redknot.ops.tile_triton import load_rows, operands, product, source, turn

# Entries and rows of a program: keys are dequantised once for that many rows, and 64 entries of 128 bf16 channels are
# 16 KB of shared memory.
ENTRIES, ROWS = 64, 8


def segment_scores(
    q: Tensor, rotation: Rotation | None, keys: Tensor | Records, rows: Tensor, head_weights: Tensor, visible: Tensor
) -> Tensor:
    """As :func:`redknot.ops.indexer.segment_scores`."""
    count, heads, d = q.shape
    scores = q.new_empty(count, len(rows), dtype=torch.float32)
    if not count or not len(rows):
        return scores
    cos, sin = (q, q) if rotation is None else (rotation.cos.contiguous(), rotation.sin.contiguous())
    _score[(triton.cdiv(len(rows), ENTRIES), triton.cdiv(count, ROWS))](
        q,
        *q.stride(),
        cos,
        sin,
        rows,
        rows.stride(0),
        len(rows),
        head_weights,
        *head_weights.stride(),
        visible,
        visible.stride(0),
        scores,
        count,
        heads,
        D=d,
        BLOCK_D=triton.next_power_of_2(d),
        BLOCK_H=max(triton.next_power_of_2(heads), 16),
        ENTRIES=ENTRIES,
        ROWS=ROWS,
        HALF=0 if rotation is None else cos.shape[1],
        OPERANDS=operands(q.dtype),
        **source(keys),
        num_warps=4,
        num_stages=2,
    )
    return scores


@triton.jit
def _score(
    q,
    q_row,
    q_head,
    q_column,
    cos,
    sin,
    rows,
    rows_stride,
    entries,
    weights,
    weights_row,
    weights_head,
    visible,
    visible_stride,
    scores,
    count,
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
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    OPERANDS: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
    VALUES: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    FP32_SCALES: tl.constexpr,
):
    """One program: ENTRIES entries against ROWS rows, all heads; ``scores`` [T, n] is contiguous."""
    column = (tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)).to(tl.int64)
    channels, head = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H)
    entry = tl.load(rows + column * rows_stride, mask=column < entries, other=-1)
    seen = (entry >= 0) & (entry < capacity)
    keys = load_rows(
        entry, seen, channels, data, data_page, data_row, data_column, rope, rope_page, rope_row, scales, scale_page,
        scale_row, D, PAGE, KIND, VALUES, ROPE, TILE, FP32_SCALES,
    )  # fmt: skip
    keys = tl.trans(keys)
    inside = (head < heads)[:, None] & (channels < D)[None, :]
    in_row = head.to(tl.int64)[:, None] * q_head + channels.to(tl.int64)[None, :] * q_column
    first = tl.program_id(1).to(tl.int64) * ROWS
    for row in range(first, tl.minimum(first + ROWS, count)):
        query = tl.load(q + row * q_row + in_row, mask=inside, other=0.0).to(tl.float32)
        if HALF > 0:
            query = turn(query, cos + row * HALF, sin + row * HALF, 1.0, BLOCK_H, D, HALF, BLOCK_D)
        dots = tl.maximum(product(query, keys, OPERANDS), 0.0)
        at = weights + row * weights_row + head.to(tl.int64) * weights_head
        weight = tl.load(at, mask=head < heads, other=0.0).to(tl.float32)
        score = tl.sum(dots * weight[:, None], 0)
        shown = seen & (column < tl.load(visible + row * visible_stride))
        into = scores + row * entries + column
        tl.store(into, tl.where(shown, score, float("-inf")), mask=column < entries)
