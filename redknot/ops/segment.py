"""Attention of rows over chosen latents of one segment, in place: the torch reference of the kernel.

The latents stay as they are, plain or packed, in the segment's frame: queries turn to it, and outputs back
(docs/decisions/0007). What comes out has no frame, so that the parts of a row merge whatever their segments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redknot.ops.attention import Partial, attend
from redknot.ops.records import Records, unpack
from redknot.ops.rope import Rotation, rotate


def gather(keys: Tensor | Records, rows: Tensor) -> Tensor:
    """Rows by number [n] of plain latents [N, d] or packed ones, float32 [n, d]; zeros for a number outside."""
    if isinstance(keys, Records):
        return unpack(keys, rows)
    found = torch.zeros(len(rows), keys.shape[1], device=keys.device)
    seen = (rows >= 0) & (rows < len(keys))
    found[seen] = keys[rows[seen]].float()
    return found


def segment_attention(q: Tensor, rotation: Rotation | None, keys: Tensor | Records, indices: Tensor) -> Partial:
    """Partial attention of ``q`` [T, H, d], scaled, over the latents numbered ``indices`` [T, k].

    ``rotation`` holds the angles of the rows' positions in the segment's frame; None: all zero. An index that is
    negative or past the latents is nothing: it is not read and has no weight. Output and LSE are float32.
    """
    rows, count = indices.shape
    held = keys.capacity if isinstance(keys, Records) else len(keys)
    hidden = torch.zeros(rows, 1, count, device=q.device)
    hidden.masked_fill_(((indices < 0) | (indices >= held)).unsqueeze(1), float("-inf"))
    turned = q.float() if rotation is None else rotate(q.float(), rotation)
    if not rows or not count:
        return Partial(torch.zeros_like(turned), turned.new_full(q.shape[:2], float("-inf")))
    found = attend(turned.unsqueeze(1), gather(keys, indices.flatten()).view(rows, count, -1), hidden)
    if rotation is not None:
        found.output = rotate(found.output, rotation.inverse())
    return found
