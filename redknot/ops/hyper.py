"""Manifold-constrained hyper-connections: several residual streams mixed into and out of each block.

Source: ``transformers`` DeepseekV4HyperConnection and DeepseekV4HyperHead; Xie et al., 2026. All mixing
weights are computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from redknot.model.geometry import Geometry
from redknot.model.weights import HyperConnectionWeights


@dataclass(frozen=True)
class Mixing:
    """How one block's output returns to the streams: ``streams' = post * output + comb^T streams``."""

    post: Tensor  # [T, hc]
    comb: Tensor  # [T, hc, hc], doubly stochastic

    def of(self, rows: Tensor) -> Mixing:
        """The mixing of some rows."""
        return Mixing(self.post[rows], self.comb[rows])


def _coefficients(weights: HyperConnectionWeights, streams: Tensor, norm_eps: float) -> Tensor:
    """Raw mixing coefficients [T, rows of fn]: the RMS-normalised streams through ``fn``."""
    flat = streams.flatten(-2).float()
    inverse_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    return torch.nn.functional.linear(flat, weights.fn) * inverse_rms


def sinkhorn(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """Make ``comb`` [hc, hc, ...] (row, column, rows of the batch) doubly stochastic, column step first."""
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    return comb


def enter(weights: HyperConnectionWeights, streams: Tensor, geometry: Geometry) -> tuple[Tensor, Mixing]:
    """Collapse ``streams`` [T, hc, hidden] into a block's input [T, hidden]; also return the way back."""
    hc, eps = geometry.hc_mult, geometry.hc_eps
    raw = _coefficients(weights, streams, geometry.norm_eps)
    base, scale = weights.base, weights.scale
    pre = torch.sigmoid(raw[..., :hc] * scale[0] + base[:hc]) + eps
    post = 2 * torch.sigmoid(raw[..., hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    logits = (raw[..., 2 * hc :] * scale[2] + base[2 * hc :]).unflatten(-1, (hc, hc))
    comb = torch.softmax(logits, dim=-1) + eps
    # The batch goes last so that the sums over the tiny matrix run along whole vectors of rows.
    comb = sinkhorn(comb.movedim((-2, -1), (0, 1)).contiguous(), geometry.hc_sinkhorn_iters, eps)
    return weigh(pre, streams), Mixing(post, comb.movedim((0, 1), (-2, -1)))


def weigh(weights: Tensor, streams: Tensor) -> Tensor:
    """Weighted sum of the streams: [T, hc] x [T, hc, hidden] -> [T, hidden]."""
    weights = weights.to(streams.dtype)
    total = streams[..., 0, :] * weights[..., :1]
    for stream in range(1, streams.shape[-2]):
        total = total.addcmul_(streams[..., stream, :], weights[..., stream, None])
    return total


def leave(mixing: Mixing, output: Tensor, streams: Tensor) -> Tensor:
    """Add a block's ``output`` [T, hidden] to the mixed streams [T, hc, hidden]."""
    # One pass per pair of streams: a batched product of such small matrices runs row by row on a CPU.
    post, comb = mixing.post.to(streams.dtype), mixing.comb.to(streams.dtype)
    mixed = []
    for into in range(streams.shape[-2]):
        total = output * post[..., into, None]
        for stream in range(streams.shape[-2]):
            total = total.addcmul_(streams[..., stream, :], comb[..., stream, into, None])
        mixed.append(total)
    return torch.stack(mixed, dim=-2)


def collapse(weights: HyperConnectionWeights, streams: Tensor, geometry: Geometry) -> Tensor:
    """The final collapse of the streams before the last norm: [T, hc, hidden] -> [T, hidden]."""
    raw = _coefficients(weights, streams, geometry.norm_eps)
    return weigh(torch.sigmoid(raw * weights.scale + weights.base) + geometry.hc_eps, streams)
