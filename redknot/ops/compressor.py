"""Compression of groups of rows into one entry: softmax-gated pooling, norm, rotation.

Source: ``transformers`` DeepseekV4CSACompressor / DeepseekV4HCACompressor. A CSA entry pools its own group's
second series (Cb) with the *previous* group's first series (Ca); an HCA entry pools its own group only.
A slot that holds no row has gate -inf and therefore weight zero, so a partial group pools what is there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redknot.model.weights import CompressorWeights
from redknot.ops.norm import rms_norm
from redknot.ops.rope import Rotation, rotate


def overlapped_slots(
    kv: Tensor, gate: Tensor, ape: Tensor, before_kv: Tensor | None, before_gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Lay out CSA groups for pooling.

    ``kv``, ``gate`` [..., n, ratio, 2 * d] are consecutive groups, ``before_*`` [..., ratio, 2 * d] the group
    before the first (None: no overlap). Gates come without the position bias ``ape`` [ratio, 2 * d].
    Returns (values, gates), each [..., n, 2 * ratio, d]: previous Ca, then own Cb.
    """
    d = kv.shape[-1] // 2
    gate = gate + ape
    if before_kv is None or before_gate is None:
        first_kv = torch.zeros_like(kv[..., :1, :, :d])
        first_gate = torch.full_like(gate[..., :1, :, :d], float("-inf"))
    else:
        first_kv = before_kv[..., None, :, :d]
        first_gate = (before_gate + ape)[..., None, :, :d]
    ca_kv = torch.cat((first_kv, kv[..., :-1, :, :d]), dim=-3)
    ca_gate = torch.cat((first_gate, gate[..., :-1, :, :d]), dim=-3)
    return torch.cat((ca_kv, kv[..., d:]), dim=-2), torch.cat((ca_gate, gate[..., d:]), dim=-2)


def pool(weights: CompressorWeights, values: Tensor, gates: Tensor, rotation: Rotation | None, eps: float) -> Tensor:
    """Pool slots into entries: [n, slots, d] x 2 -> [n, d], normalised and rotated to the group's first row.

    ``rotation`` holds the n groups' first positions; None leaves the entries unrotated (a trainer rotates batches
    itself).
    """
    pooled = (values * gates.softmax(dim=-2, dtype=torch.float32).to(values.dtype)).sum(-2)
    entries = rms_norm(pooled, weights.norm, eps)
    return entries if rotation is None else rotate(entries, rotation)
