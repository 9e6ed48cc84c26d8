"""Attention of rows over part of the latents, and the merge of parts by log-sum-exp.

One latent is key and value for all heads. Queries and keys of a part come rotated to one frame; outputs are merged in
one frame, and the sink of each head enters once, at the end. Everything is float32. Sources: ``transformers``
eager_attention_forward (sinks as one more logit); FlashAttention (arXiv 2205.14135) for the merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_GATHERED = 1 << 19  # channels of keys gathered at a time: 2 MB; larger buffers fault their pages in again
_FLOOR = -1e30  # stands in for the maximum of no logits at all, so that exp gives zero and not NaN


@dataclass
class Partial:
    """Softmax-normalised output over some keys and the log-sum-exp of their logits; an empty side has LSE -inf."""

    output: Tensor  # [T, H, d]
    lse: Tensor  # [T, H]


def attend(q: Tensor, keys: Tensor, mask: Tensor | None) -> Partial:
    """Attention of n groups of m rows, each group over its own k keys.

    ``q`` [n, m, H, d] is scaled and rotated; ``keys`` [n, k, d]; ``mask`` [n, m, k] is 0 where visible and -inf
    where not, None when every row sees every key. Returns rows in group order, T = n * m. A row that sees no key
    has output 0 and LSE -inf; a hidden key must be finite or it spoils the product, so callers never gather unset
    memory without a clamp.
    """
    n, m, heads, d = q.shape
    logits = torch.bmm(q.reshape(n, m * heads, d), keys.transpose(1, 2))
    if mask is not None:
        logits.view(n, m, heads, -1).add_(mask.unsqueeze(2))
    top = logits.amax(-1, keepdim=True).clamp_(min=_FLOOR)
    weights = logits.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    output = torch.bmm(weights, keys).div_(total.clamp_min(torch.finfo(torch.float32).tiny))
    lse = top.add_(total.log_())
    return Partial(output.view(n * m, heads, d), lse.view(n * m, heads))


def attend_chosen(q: Tensor, keys: Tensor, indices: Tensor, mask: Tensor) -> Partial:
    """Attention of every row over keys of its own: ``q`` [T, H, d], ``keys`` [N, d], ``indices`` and ``mask`` [T, k].

    As :func:`attend` with each row a group; keys are gathered for some rows at a time.
    """
    rows, heads, d = q.shape
    found = Partial(torch.empty_like(q), q.new_empty(rows, heads))
    step = max(MOST_GATHERED // max(indices.shape[1] * d, 1), 1)
    for lo in range(0, rows, step):
        part = slice(lo, lo + step)
        gathered = keys.index_select(0, indices[part].flatten()).view(-1, indices.shape[1], d)
        some = attend(q[part].unsqueeze(1), gathered, mask[part].unsqueeze(1))
        found.output[part], found.lse[part] = some.output, some.lse
    return found


def merge_(into: Partial, part: Partial) -> None:
    """Merge ``part`` into ``into`` (same rows), in place; order independent, either may be empty.

    The shares of both sums are normalised by their own total: weights taken from a rounded log-sum-exp would be off
    by its last place, in some order.
    """
    top = torch.maximum(into.lse, part.lse).clamp_(min=_FLOOR)
    mine, other = (into.lse - top).exp_(), (part.lse - top).exp_()
    total = mine + other
    safe = total.clamp_min(torch.finfo(torch.float32).tiny)
    into.output.mul_(mine.div_(safe).unsqueeze(-1)).addcmul_(part.output, other.div_(safe).unsqueeze(-1))
    into.lse.copy_(top.add_(total.log_()))


def apply_sink_(part: Partial, sinks: Tensor) -> Tensor:
    """Let each head's sink ``sinks`` [H] take its share, once; returns the final output [T, H, d] (in place).

    A sink of +inf takes everything, one of -inf nothing; a row with no keys and no sink gives 0.
    """
    share = torch.sigmoid(part.lse - sinks)
    return part.output.mul_(torch.nan_to_num_(share, nan=0.0).unsqueeze(-1))
