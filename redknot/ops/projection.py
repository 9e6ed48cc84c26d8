"""The first output projection of some heads into some rows: the torch reference of the kernel.

A row whose Local heads are restored runs its Global heads only, and what they give plus the restored Z_L replaces the
row; every other row is the projection of all its heads. No row is ever added to twice.
"""

from __future__ import annotations

import torch
from torch import Tensor


def project_rows_(
    z: Tensor, output: Tensor, wo_a: Tensor, rows: Tensor | None = None, restored: Tensor | None = None
) -> None:
    """Replace rows of ``z`` [T, G, R], in place, by the grouped projection of ``output`` [t, G, h, d].

    ``wo_a`` [G, h * d, R] holds the weights of those h heads of each group. ``rows`` [t] are distinct row numbers; one
    that is negative or past the end is skipped, None: 0 to t - 1. ``restored`` [t, G * R] is added (Z_L).
    """
    found = torch.bmm(output.flatten(2).transpose(0, 1).float(), wo_a.float()).transpose(0, 1)
    if restored is not None:
        found = found + restored.float().view(found.shape)
    if rows is None:
        z[: len(found)] = found.to(z.dtype)
    else:
        seen = (rows >= 0) & (rows < len(z))
        z[rows[seen]] = found[seen].to(z.dtype)
