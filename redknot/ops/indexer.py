"""Lightning indexer: scores of entries, and the entries a row keeps.

Source: ``transformers`` DeepseekV4Indexer and DeepseekV4IndexerScorer. Scores are float32; ties at the cut go to
the lower global position, so every tensor-parallel rank keeps the same entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redknot.ops.records import Records
from redknot.ops.rope import Rotation, rotate
from redknot.ops.segment import gather

MOST_DOTS = 1 << 19  # dot products of rows, heads and entries made at a time: 2 MB


def index_scores(q: Tensor, keys: Tensor, head_weights: Tensor) -> Tensor:
    """Sum over heads of weight * ReLU(q . k).

    ``q`` [T, Hi, di] and ``keys`` [N, di] rotated to one frame, ``head_weights`` [T, Hi] with both scales (di^-1/2
    and Hi^-1/2) in them; returns [T, N].
    """
    rows, heads, _ = q.shape
    scores = q.new_empty(rows, keys.shape[0])
    step = max(MOST_DOTS // max(heads * keys.shape[0], 1), 1)
    for lo in range(0, rows, step):
        part = slice(lo, lo + step)
        dots = torch.matmul(q[part].flatten(0, 1), keys.t()).relu_().unflatten(0, (-1, heads))
        torch.bmm(head_weights[part].unsqueeze(1), dots, out=scores[part].unsqueeze(1))
    return scores


def segment_scores(
    q: Tensor, rotation: Rotation | None, keys: Tensor | Records, rows: Tensor, head_weights: Tensor, visible: Tensor
) -> Tensor:
    """Scores of the entries of one segment, whose keys stay in place, plain or packed: float32 [T, n].

    ``q`` [T, Hi, di] turns to the segment's frame by ``rotation`` (None: all zero) and ``head_weights`` [T, Hi] are as
    in :func:`index_scores`; ``rows`` [n] number the keys of the entries in order. An entry scores -inf for a row that
    sees fewer (``visible`` [T]), and where its number is negative or past the keys: that is not read.
    """
    held = keys.capacity if isinstance(keys, Records) else len(keys)
    turned = q.float() if rotation is None else rotate(q.float(), rotation)
    scores = index_scores(turned, gather(keys, rows), head_weights.float())
    hidden = torch.arange(len(rows), device=q.device) >= visible.unsqueeze(-1)
    return scores.masked_fill_(hidden | (rows < 0) | (rows >= held), float("-inf"))


def keep_best(scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The ``topk`` best of more than ``topk`` entries: [T, N] (hidden entries -inf) -> (indices, mask), [T, topk] each.

    The additive mask is -inf where a row sees fewer than ``topk`` entries; the order of the indices means nothing.
    """
    best = scores.topk(topk + 1, dim=-1)
    values, indices = best.values[:, :topk], best.indices[:, :topk]
    tied = (values[:, -1] == best.values[:, topk]) & values[:, -1].isfinite()
    if bool(tied.any()):
        indices[tied] = _lowest(scores[tied], values[tied][:, -1:], topk)
    return indices, torch.zeros_like(values).masked_fill_(values == float("-inf"), float("-inf"))


def keep_lowest(scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """As :func:`keep_best`, the indices ascending; nothing waits for the device, whether there are ties or not."""
    indices = _lowest(scores, scores.topk(topk, dim=-1).values[:, -1:], topk)
    values = scores.gather(-1, indices)
    return indices, torch.zeros_like(values).masked_fill_(values == float("-inf"), float("-inf"))


def _lowest(scores: Tensor, cut: Tensor, topk: int) -> Tensor:
    """Indices [t, topk], ascending, of what is above the ``cut`` [t, 1], and of the lowest that equal it."""
    above, equal = scores > cut, scores == cut
    room = topk - above.sum(-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(-1) <= room))
    # Every row keeps ``topk``, so that each has its place; what is dropped goes to one behind the last.
    place = torch.where(kept, kept.cumsum(-1) - 1, topk)
    column = torch.arange(scores.shape[-1], device=scores.device).expand_as(place)
    return place.new_empty(len(scores), topk + 1).scatter_(-1, place, column)[:, :topk]


def cut_margins(scores: Tensor, topk: int) -> Tensor:
    """Distance between the last kept and the first dropped score of each row, +inf where nothing is dropped: [T]."""
    if scores.shape[-1] <= topk:
        return torch.full((scores.shape[0],), float("inf"))
    best = scores.topk(topk + 1, dim=-1).values
    return torch.nan_to_num(best[:, topk - 1] - best[:, topk], nan=float("inf"), posinf=float("inf"))
