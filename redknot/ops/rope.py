"""Partial interleaved rotary embedding, by position, with angles good to a million tokens.

DeepSeek-V4 rotates the last ``rope_dim`` channels of a vector, in consecutive pairs, and undoes the rotation
on the attention output (K and V are one vector). Angles are products in float64 of an integer position and
the reference's float32 inverse frequency: a float32 product is off by 0.03 rad at position 1M.
Sources: ``transformers`` DeepseekV4RotaryEmbedding; YaRN, arXiv 2309.00071.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from redknot.model.ropespec import RopeSpec, YarnScaling


@dataclass(frozen=True)
class Rotation:
    """cos and sin of the angles of some rows, float32 [T, rope_dim / 2] each."""

    cos: Tensor
    sin: Tensor

    def inverse(self) -> Rotation:
        """The opposite rotation, as applied to attention outputs."""
        return Rotation(self.cos, -self.sin)


def inverse_frequencies(spec: RopeSpec, rope_dim: int) -> Tensor:
    """Inverse frequencies in radians per token, float32 [rope_dim / 2], as the reference computes them."""
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.int64).to(torch.float32) / rope_dim
    powers = spec.theta**exponents
    if spec.yarn is None:
        return 1.0 / powers
    kept = 1.0 - _interpolation_ramp(spec.yarn, spec.theta, rope_dim)
    return (1.0 / (spec.yarn.factor * powers)) * (1.0 - kept) + (1.0 / powers) * kept


def _interpolation_ramp(yarn: YarnScaling, theta: float, rope_dim: int) -> Tensor:
    """0 where a frequency is kept, 1 where it is divided by the factor; float32 [rope_dim / 2]."""

    def channel(rotations: float) -> float:
        ratio = yarn.original_max_positions / (rotations * 2 * math.pi)
        return rope_dim * math.log(ratio) / (2 * math.log(theta))

    low = max(math.floor(channel(yarn.beta_fast)), 0)
    high = min(math.ceil(channel(yarn.beta_slow)), rope_dim - 1)
    width = (high - low) if high != low else 0.001
    steps = torch.arange(rope_dim // 2, dtype=torch.float32)
    return ((steps - low) / width).clamp(0, 1)


def rotation_at(positions: Tensor, inverse_frequency: Tensor) -> Rotation:
    """The rotation of integer ``positions`` [T] (negative ones rotate back); see the module docstring."""
    angles = positions.to(torch.float64).unsqueeze(-1) * inverse_frequency.to(torch.float64)
    return Rotation(angles.cos().to(torch.float32), angles.sin().to(torch.float32))


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the last channels of ``x`` [T, ..., d]; every dimension between rows and channels shares the angle."""
    half = rotation.cos.shape[-1]
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (half,)
    cos, sin = rotation.cos.view(shape), rotation.sin.view(shape)
    kept, turned = x[..., : -2 * half], x[..., -2 * half :]
    even, odd = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return torch.cat((kept, pairs.flatten(-2).to(x.dtype)), dim=-1)


def rotate_(x: Tensor, rotation: Rotation) -> None:
    """As :func:`rotate`, in place, for float32 ``x``: channels that no rotation touches are not copied."""
    half = rotation.cos.shape[-1]
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (half,)
    turned = torch.view_as_complex(x[..., -2 * half :].unflatten(-1, (half, 2)))
    turned.mul_(torch.complex(rotation.cos, rotation.sin).view(shape))
