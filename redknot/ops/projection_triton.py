"""Triton kernel of :mod:`redknot.ops.projection`: product, restored part and replacement. Unverified on hardware."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redknot.ops.tile_triton import operands, product

# Rows, columns and depth of a tile: operands of 16 KB each in bf16, sums of 64 KB in registers of four warps.
BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 64
FEW = 16  # rows of a tile where there are no more (decode)


def project_rows_(
    z: Tensor, output: Tensor, wo_a: Tensor, rows: Tensor | None = None, restored: Tensor | None = None
) -> None:
    """As :func:`redknot.ops.projection.project_rows_`."""
    groups, depth, rank = wo_a.shape
    count, flat = len(output), output.flatten(2)
    if not count:
        return
    beside = z if restored is None else restored.unflatten(1, (groups, rank))
    block_m = FEW if count <= FEW else BLOCK_M
    block_n = min(BLOCK_N, max(triton.next_power_of_2(rank), 16))
    block_k = min(BLOCK_K, max(triton.next_power_of_2(depth), 16))
    _project[(triton.cdiv(count, block_m), triton.cdiv(rank, block_n), groups)](
        z,
        *z.stride(),
        len(z),
        flat,
        *flat.stride(),
        wo_a,
        *wo_a.stride(),
        flat if rows is None else rows,
        0 if rows is None else rows.stride(0),
        beside,
        *beside.stride(),
        count,
        depth,
        rank,
        PICKED=rows is not None,
        RESTORED=restored is not None,
        OPERANDS=operands(torch.promote_types(output.dtype, wo_a.dtype)),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4 if block_m == FEW else 8,
        num_stages=3,
    )


@triton.jit
def _project(
    z,
    z_row,
    z_group,
    z_column,
    held,
    output,
    output_row,
    output_group,
    output_column,
    weight,
    weight_group,
    weight_row,
    weight_column,
    rows,
    rows_stride,
    restored,
    restored_row,
    restored_group,
    restored_column,
    count,
    depth,
    rank,
    PICKED: tl.constexpr,
    RESTORED: tl.constexpr,
    OPERANDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: BLOCK_M rows and BLOCK_N columns of one group."""
    number = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    group = tl.program_id(2).to(tl.int64)
    row = number
    if PICKED:
        row = tl.load(rows + number * rows_stride, mask=number < count, other=-1).to(tl.int64)
    here = (number < count) & (row >= 0) & (row < held)
    left = output + group * output_group + number[:, None] * output_row
    right = weight + group * weight_group + column[None, :] * weight_column
    summed = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, depth, BLOCK_K):
        k = (first + tl.arange(0, BLOCK_K)).to(tl.int64)
        a = tl.load(left + k[None, :] * output_column, mask=here[:, None] & (k < depth)[None, :], other=0.0)
        b = tl.load(right + k[:, None] * weight_row, mask=(k < depth)[:, None] & (column < rank)[None, :], other=0.0)
        summed += product(a.to(tl.float32), b.to(tl.float32), OPERANDS)
    inside = here[:, None] & (column < rank)[None, :]
    if RESTORED:
        at = restored + number[:, None] * restored_row + group * restored_group + column[None, :] * restored_column
        summed += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    into = z + row[:, None] * z_row + group * z_group + column[None, :] * z_column
    tl.store(into, summed.to(z.dtype.element_ty), mask=inside)
