"""Lightning indexer: scores of entries, and the entries a row keeps.

Source: ``transformers`` DeepseekV4Indexer and DeepseekV4IndexerScorer. Scores are float32; ties at the cut go to
the lower global position, so every tensor-parallel rank keeps the same entries.
"""

from __future__ import annotations

import torch
from torch import Tensor


def index_scores(q: Tensor, keys: Tensor, head_weights: Tensor) -> Tensor:
    """Sum over heads of weight * ReLU(q . k).

    ``q`` [T, Hi, di] rotated to the keys' frame, ``keys`` [N, di], ``head_weights`` [T, Hi] with both scales
    (di^-1/2 and Hi^-1/2) in them; returns [T, N].
    """
    dots = torch.matmul(q.reshape(-1, q.shape[-1]), keys.t()).relu_()
    return torch.bmm(head_weights.unsqueeze(1), dots.view(q.shape[0], q.shape[1], -1)).squeeze(1)


def keep_best(scores: Tensor, topk: int) -> Tensor:
    """The ``topk`` best entries of each row as a mask: [T, N] (hidden entries -inf) -> [T, N] bool.

    Rows with fewer visible entries keep all of them.
    """
    best = scores.topk(min(topk + 1, scores.shape[-1]), dim=-1).values
    cut = best[:, min(topk, best.shape[-1]) - 1 :][:, :1]
    kept = scores >= cut
    if best.shape[-1] > topk:
        tied = (best[:, topk] == best[:, topk - 1]) & best[:, topk].isfinite()
        if bool(tied.any()):
            kept[tied] = _keep_lowest(scores[tied], cut[tied], topk)
    return kept & (scores > float("-inf"))


def _keep_lowest(scores: Tensor, cut: Tensor, topk: int) -> Tensor:
    """As :func:`keep_best` for rows with a tie at the cut."""
    above, equal = scores > cut, scores == cut
    room = topk - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def cut_margins(scores: Tensor, topk: int) -> Tensor:
    """Distance between the last kept and the first dropped score of each row, +inf where nothing is dropped: [T]."""
    if scores.shape[-1] <= topk:
        return torch.full((scores.shape[0],), float("inf"))
    best = scores.topk(topk + 1, dim=-1).values
    return torch.nan_to_num(best[:, topk - 1] - best[:, topk], nan=float("inf"), posinf=float("inf"))


def kept_indices(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Turn a mask [T, N] into padded indices.

    Returns (indices [T, c] with 0 where padded, additive mask [T, c] with -inf where padded), c the largest count.
    """
    counts = kept.sum(-1)
    width = max(int(counts.max()), 1)
    row, column = kept.nonzero(as_tuple=True)
    slot = torch.arange(row.shape[0]) - (counts.cumsum(0) - counts)[row]
    indices = torch.zeros(kept.shape[0], width, dtype=torch.int64)
    indices[row, slot] = column
    padding = torch.arange(width) >= counts.unsqueeze(-1)
    return indices, torch.zeros(indices.shape).masked_fill_(padding, float("-inf"))
