"""Triton kernels of :func:`redknot.ops.moe.experts_forward`: only kept pairs exist. Unverified on hardware.

Kept pairs of this rank's experts are sorted by expert, without the host knowing how many there are: grids are as large
as they could be, and a program past the last pair ends at once. A dropped pair has no slot, no row is gathered for it
and no product made. The combine reads each row's pairs in the order of its columns, so that a sum is always the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from redknot.model.weights import MoeWeights
from redknot.ops.moe import Routing, gated
from redknot.ops.tile_triton import operands, product

# Pairs, columns and depth of a tile, as in projection_triton; fewer pairs where an expert gets few rows.
BLOCK_M, BLOCK_N, BLOCK_K = 64, 128, 64
FEW = 16
COMBINED = 256  # channels that one program of the combine adds up


@dataclass(frozen=True)
class Dispatch:
    """Kept pairs sorted by expert into slots, and tiles of slots that belong to one expert each."""

    rows: Tensor  # [T * k] row of each slot; slots behind the last pair hold nothing of use
    scale: Tensor  # [T * k] weight of each slot
    slots: Tensor  # [T, k] slot of each pair, -1 where it is dropped or another rank's
    tile_expert: Tensor  # [tiles] local expert, or the number of experts behind the last tile
    tile_first: Tensor  # [tiles] first slot
    ends: Tensor  # [E] slot behind each expert's last
    block: int  # slots of a tile

    @property
    def pairs(self) -> Tensor:
        """Kept pairs, on the device."""
        return self.ends[-1]


def dispatch(routing: Routing, first_expert: int, local: int) -> Dispatch:
    """Lay out the kept pairs of ``local`` >= 1 experts; nothing waits for the device."""
    count, k = routing.experts.shape
    flat, device = routing.experts.flatten() - first_expert, routing.experts.device
    kept = (flat >= 0) & (flat < local)
    if routing.kept is not None:
        kept &= routing.kept.flatten()
    flat = torch.where(kept, flat, local)  # sorts behind all experts
    order = flat.argsort(stable=True)
    counts = torch.zeros(local + 1, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))[:-1]
    ends = counts.cumsum(0)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
    block = FEW if count * k <= FEW * local else BLOCK_M
    tiles = (counts + block - 1).div(block, rounding_mode="floor")
    tile_ends = tiles.cumsum(0)
    tile = torch.arange(triton.cdiv(count * k, block) + local, device=device)
    expert = torch.searchsorted(tile_ends, tile, right=True)
    mine = expert.clamp(max=local - 1)
    first = (ends - counts)[mine] + (tile - (tile_ends - tiles)[mine]) * block
    slots = torch.where(kept, place, -1).view(count, k)
    return Dispatch(order // k, routing.weights.flatten()[order], slots, expert, first, ends, block)


def experts_forward(weights: MoeWeights, x: Tensor, routing: Routing, limit: float) -> tuple[Tensor, int | Tensor]:
    """As :func:`redknot.ops.moe.experts_forward`; the number of pairs stays on the device, a tensor of no dimension."""
    output = gated(x, weights.shared_w13, weights.shared_w2, limit)
    if not len(x) or not len(weights.w13):
        return output, 0
    laid_out = dispatch(routing, weights.first_expert, len(weights.w13))
    add_experts_(output, weights, x, laid_out, limit)
    return output, laid_out.pairs


def add_experts_(output: Tensor, weights: MoeWeights, x: Tensor, laid_out: Dispatch, limit: float) -> None:
    """Add the routed experts of the dispatched pairs to ``output`` [T, hidden], contiguous, in place."""
    experts, hidden, width = weights.w2.shape
    slots = len(laid_out.rows)
    inner, outer = x.new_empty(slots, width), x.new_empty(slots, hidden, dtype=torch.float32)
    tiles, block_n = len(laid_out.tile_expert), BLOCK_N
    shared = (laid_out.tile_expert, laid_out.tile_first, laid_out.ends, laid_out.rows, laid_out.scale)
    shape = {
        "EXPERTS": experts,
        "OPERANDS": operands(torch.promote_types(x.dtype, weights.w2.dtype)),
        "BLOCK_M": laid_out.block,
        "BLOCK_K": BLOCK_K,
    }
    half = block_n // 2  # a program makes as many columns of the gate as of the up matrix
    _inner[(tiles, triton.cdiv(width, half))](
        *shared, x, *x.stride(), weights.w13, *weights.w13.stride(), inner, hidden, width, limit, **shape,
        BLOCK_N=half, num_warps=8 if laid_out.block == BLOCK_M else 4, num_stages=3,
    )  # fmt: skip
    _outer[(tiles, triton.cdiv(hidden, block_n))](
        *shared, inner, weights.w2, *weights.w2.stride(), outer, hidden, width, **shape, BLOCK_N=block_n,
        num_warps=8 if laid_out.block == BLOCK_M else 4, num_stages=3,
    )  # fmt: skip
    _combine[(len(output), triton.cdiv(hidden, COMBINED))](
        output, outer, laid_out.slots, hidden, K=laid_out.slots.shape[1], BLOCK=COMBINED, num_warps=4
    )


@triton.jit
def _inner(
    tile_expert,
    tile_first,
    ends,
    rows,
    scale,
    x,
    x_row,
    x_column,
    weight,
    weight_expert,
    weight_row,
    weight_column,
    inner,
    hidden,
    width,
    limit,
    EXPERTS: tl.constexpr,
    OPERANDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows gathered, times gate and up matrices, SwiGLU with its clamp: ``inner`` [slots, width]."""
    expert = tl.load(tile_expert + tl.program_id(0)).to(tl.int64)
    if expert < EXPERTS:
        slot = tl.load(tile_first + tl.program_id(0)) + tl.arange(0, BLOCK_M)
        here = slot < tl.load(ends + expert)
        row = tl.load(rows + slot, mask=here, other=0)
        column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        left = x + row[:, None] * x_row
        right = weight + expert * weight_expert + column[None, :] * weight_row
        right_up = weight + expert * weight_expert + (column + width)[None, :] * weight_row
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, hidden, BLOCK_K):
            k = (first + tl.arange(0, BLOCK_K)).to(tl.int64)
            a = tl.load(left + k[None, :] * x_column, mask=here[:, None] & (k < hidden)[None, :], other=0.0)
            deep = k[:, None] * weight_column
            inside = (k < hidden)[:, None] & (column < width)[None, :]
            b = tl.load(right + deep, mask=inside, other=0.0)
            gate += product(a.to(tl.float32), b.to(tl.float32), OPERANDS)
            b = tl.load(right_up + deep, mask=inside, other=0.0)
            up += product(a.to(tl.float32), b.to(tl.float32), OPERANDS)
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        found = gate / (1.0 + tl.exp(-gate)) * up
        into = inner + slot[:, None] * width + column[None, :]
        tl.store(into, found.to(inner.dtype.element_ty), mask=here[:, None] & (column < width)[None, :])


@triton.jit
def _outer(
    tile_expert,
    tile_first,
    ends,
    rows,
    scale,
    inner,
    weight,
    weight_expert,
    weight_row,
    weight_column,
    outer,
    hidden,
    width,
    EXPERTS: tl.constexpr,
    OPERANDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Times the down matrix and the pair's weight: ``outer`` [slots, hidden], float32."""
    expert = tl.load(tile_expert + tl.program_id(0)).to(tl.int64)
    if expert < EXPERTS:
        slot = tl.load(tile_first + tl.program_id(0)) + tl.arange(0, BLOCK_M)
        here = slot < tl.load(ends + expert)
        column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        right = weight + expert * weight_expert + column[None, :] * weight_row
        summed = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, width, BLOCK_K):
            k = (first + tl.arange(0, BLOCK_K)).to(tl.int64)
            a = tl.load(
                inner + slot[:, None] * width + k[None, :], mask=here[:, None] & (k < width)[None, :], other=0.0
            )
            inside = (k < width)[:, None] & (column < hidden)[None, :]
            b = tl.load(right + k[:, None] * weight_column, mask=inside, other=0.0)
            summed += product(a.to(tl.float32), b.to(tl.float32), OPERANDS)
        summed *= tl.load(scale + slot, mask=here, other=0.0).to(tl.float32)[:, None]
        into = outer + slot[:, None] * hidden + column[None, :]
        tl.store(into, summed, mask=here[:, None] & (column < hidden)[None, :])


@triton.jit
def _combine(output, outer, slots, hidden, K: tl.constexpr, BLOCK: tl.constexpr):
    """Add each row's pairs to what the shared expert gave, in float32, and round once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    into = output + row * hidden + column
    summed = tl.load(into, mask=inside, other=0.0).to(tl.float32)
    for number in range(0, K):
        slot = tl.load(slots + row * K + number).to(tl.int64)
        if slot >= 0:
            summed += tl.load(outer + slot * hidden + column, mask=inside, other=0.0)
    tl.store(into, summed.to(output.dtype.element_ty), mask=inside)
