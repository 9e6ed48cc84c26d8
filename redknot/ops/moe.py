"""Mixture of experts: hash or top-k router, adaptive fan-out, grouped expert GEMMs, shared expert.

Source: ``transformers`` DeepseekV4TopKRouter, DeepseekV4HashRouter, DeepseekV4Experts, DeepseekV4MLP. Fan-out
drops whole (row, expert) pairs before any expert GEMM; kept experts keep their weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu, softplus

from redknot.model.geometry import Geometry
from redknot.model.weights import MoeWeights


@dataclass(frozen=True)
class FanOut:
    """How many of the native experts of a row run: the fewest, at least ``k_min``, whose weights reach ``tau``."""

    k_min: int
    tau: float


@dataclass(frozen=True)
class Routing:
    """Chosen experts of T rows; a dropped pair has weight 0 and ``kept`` False."""

    experts: Tensor  # [T, k] int64
    weights: Tensor  # [T, k]
    kept: Tensor | None  # [T, k] bool, None when all are kept


def score(logits: Tensor, scoring: str) -> Tensor:
    """Router activation of DeepSeek-V4 configurations: sqrtsoftplus, softmax or sigmoid."""
    if scoring == "sqrtsoftplus":
        return softplus(logits).sqrt()
    return logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()


def route(
    weights: MoeWeights, x: Tensor, token_ids: Tensor, geometry: Geometry, fan_out: FanOut | None = None
) -> Routing:
    """Choose experts for ``x`` [T, hidden]; hash layers look them up by ``token_ids`` [T]."""
    scores = score(linear(x, weights.gate), geometry.scoring)
    if weights.tid2eid is not None:
        experts = weights.tid2eid[token_ids]
    else:
        biased = scores if weights.bias is None else scores + weights.bias
        experts = torch.topk(biased, geometry.experts_per_token, dim=-1, sorted=False).indices
    chosen = scores.gather(-1, experts)
    chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * geometry.routed_scale
    if fan_out is None or fan_out.k_min >= experts.shape[-1]:
        return Routing(experts, chosen, None)
    kept = fan_out_mask(chosen, fan_out)
    return Routing(experts, chosen * kept, kept)


def fan_out_mask(weights: Tensor, fan_out: FanOut) -> Tensor:
    """Which of the native experts stay: [T, k] weights -> [T, k] bool (ties keep the earlier column)."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    share = (ordered.cumsum(-1) - ordered) / ordered.sum(-1, keepdim=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    stays = (share < fan_out.tau) | (rank < fan_out.k_min)
    return torch.zeros_like(stays).scatter(-1, order, stays)


def gated(x: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    """SwiGLU with DeepSeek's clamp: [T, hidden] -> [T, hidden]; w13 is the gate matrix over the up matrix."""
    gate, up = linear(x, w13).chunk(2, dim=-1)
    return linear(silu(gate.clamp(max=limit)).mul(up.clamp(-limit, limit)), w2)


def experts_forward(weights: MoeWeights, x: Tensor, routing: Routing, limit: float) -> tuple[Tensor, int | Tensor]:
    """This rank's routed experts plus its slice of the shared expert: ([T, hidden], (row, expert) pairs run).

    The sum over ranks is the block's output.
    """
    output = gated(x, weights.shared_w13, weights.shared_w2, limit)
    flat = routing.experts.flatten()
    order = flat.argsort(stable=True)
    if routing.kept is not None:
        order = order[routing.kept.flatten()[order]]
    rows = order // routing.experts.shape[-1]
    scale = routing.weights.flatten()[order].unsqueeze(-1)
    local = weights.w13.shape[0]
    counts = torch.bincount(flat[order], minlength=weights.first_expert + local).tolist()
    start, ran = sum(counts[: weights.first_expert]), 0
    for index in range(local):
        count = counts[weights.first_expert + index]
        if count:
            mine = slice(start, start + count)
            part = gated(x[rows[mine]], weights.w13[index], weights.w2[index], limit)
            output.index_add_(0, rows[mine], part.mul_(scale[mine]))
            start, ran = start + count, ran + count
    return output, ran
