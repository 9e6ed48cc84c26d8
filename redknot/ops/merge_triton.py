"""Triton kernel of :mod:`redknot.ops.merge`: all parts of a row in one pass. Unverified on hardware."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from redknot.ops.attention import Partial

HEADS = 8  # of a program: 16 KB of float32 sums with 512 channels


def merge_segments(outputs: Tensor, lses: Tensor, sinks: Tensor | None) -> Partial:
    """As :func:`redknot.ops.merge.merge_segments`."""
    parts, rows, heads, d = outputs.shape
    found = Partial(outputs.new_empty(rows, heads, d), lses.new_empty(rows, heads))
    if rows and heads:
        _merge[(rows, triton.cdiv(heads, HEADS))](
            outputs,
            *outputs.stride(),
            lses,
            *lses.stride(),
            lses if sinks is None else sinks,
            0 if sinks is None else sinks.stride(0),
            found.output,
            found.lse,
            parts,
            heads,
            D=d,
            BLOCK_D=triton.next_power_of_2(d),
            BLOCK_H=HEADS,
            SINKS=sinks is not None,
            num_warps=4,
        )
    return found


@triton.jit
def _merge(
    outputs,
    output_part,
    output_row,
    output_head,
    output_column,
    lses,
    lse_part,
    lse_row,
    lse_head,
    sinks,
    sinks_stride,
    merged,
    merged_lse,
    parts,
    heads,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One program: BLOCK_H heads of one row; ``merged`` [T, H, D] and ``merged_lse`` [T, H] are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    columns = tl.arange(0, BLOCK_D).to(tl.int64)
    here = head < heads
    inside = here[:, None] & (columns < D)[None, :]
    lse_at = lses + row * lse_row + head * lse_head
    output_at = outputs + row * output_row + head[:, None] * output_head + columns[None, :] * output_column
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    summed = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    for number in range(0, parts):
        part = tl.full((), number, tl.int64)
        lse = tl.load(lse_at + part * lse_part, mask=here, other=float("-inf"))
        some = lse > float("-inf")
        output = tl.load(output_at + part * output_part, mask=inside & some[:, None], other=0.0)
        higher = tl.maximum(top, lse)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, weight = tl.exp(top - safe), tl.exp(lse - safe)
        total = total * shrink + weight
        summed = summed * shrink[:, None] + output * weight[:, None]
        top = higher
    seen = total > 0
    safe_total = tl.where(seen, total, 1.0)
    lse = tl.where(seen, top + tl.log(safe_total), float("-inf"))
    share = 1.0 / safe_total
    if SINKS:
        sink = tl.load(sinks + head * sinks_stride, mask=here, other=0.0)
        # exp overflows to infinity and the share to 0; a row of no keys has the output 0 whatever the sink.
        share = tl.where(seen, share / (1.0 + tl.exp(sink - tl.where(seen, lse, 0.0))), 0.0)
    into = row * heads + head
    tl.store(merged + into[:, None] * D + columns[None, :], summed * share[:, None], mask=inside)
    tl.store(merged_lse + into, lse, mask=here)
