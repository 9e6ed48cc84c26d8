"""Root-mean-square normalisation, with and without a weight (transformers DeepseekV4RMSNorm)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalise the last dimension of ``x`` in float32; the result has the dtype of ``x``."""
    return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)
