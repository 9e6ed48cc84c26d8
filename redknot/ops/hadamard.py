"""The Walsh-Hadamard transform that SGLang applies to indexer keys behind their rotation, before it quantises them.

It spreads a large channel over all of them, so that fewer bits hold the key; scores do not change where queries are
transformed too. Source: SGLang 0.5.23, ``deepseek_v4/fused_norm_rope_v2.cuh`` part 3 and ``rotate_activation``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redknot.errors import ConfigError


def hadamard(x: Tensor) -> Tensor:
    """The transform of the last dimension, in natural order and with unit norm: its own inverse.

    ``x`` [..., n] in floating point, n a power of two (else ConfigError); the same shape and dtype comes back.
    """
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ConfigError(f"hadamard: {width} channels are not a power of two")
    turned, half = x, 1
    while half < width:
        pairs = turned.unflatten(-1, (width // (2 * half), 2, half))
        one, other = pairs[..., 0, :], pairs[..., 1, :]
        turned = torch.stack((one + other, one - other), dim=-2).flatten(-3)
        half *= 2
    scaled: Tensor = turned * width**-0.5
    return scaled
