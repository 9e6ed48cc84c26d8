"""What stands in for FlashMLA: the semantics it publishes, in plain torch, refusing what its C++ interface refuses.

Source: github.com/deepseek-ai/FlashMLA at 9241ae3, ``tests/ref.py`` and ``csrc/api/sparse_fwd.h``.
"""

from __future__ import annotations

import torch


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, heads, d = q.shape
    held, one, width = kv.shape
    assert heads in (64, 128)
    assert (d, width, one, d_v) == (d, d, 1, 512)
    assert d in (512, 576)
    assert q.dtype == kv.dtype == torch.bfloat16
    assert indices.dtype == torch.int32
    assert indices.shape[:2] == (rows, 1)
    assert indices.shape[2] > 0
    assert indices.shape[2] % 128 == 0
    assert q.stride(-1) == kv.stride(-1) == indices.stride(-1) == 1
    chosen = indices[:, 0].long()
    if topk_length is not None:
        assert topk_length.dtype == torch.int32
        assert topk_length.shape == (rows,)
        assert bool((topk_length > 0).all())  # what happens without is not said anywhere
        chosen = chosen.masked_fill(torch.arange(chosen.shape[1]) >= topk_length.unsqueeze(-1), -1)
    hidden = (chosen < 0) | (chosen >= held)
    latents = kv[chosen.masked_fill(hidden, 0), 0].float().masked_fill(hidden.unsqueeze(-1), 0.0)
    logits = torch.einsum("thd,tkd->thk", q.float(), latents) * sm_scale
    logits = logits.masked_fill(hidden.unsqueeze(1), float("-inf"))
    lse = logits.logsumexp(-1)
    whole = lse if attn_sink is None else torch.logaddexp(lse, attn_sink.expand_as(lse))
    whole = whole.masked_fill(whole == float("-inf"), float("inf"))
    output = torch.einsum("thk,tkd->thd", (logits - whole.unsqueeze(-1)).exp(), latents[..., :d_v])
    return output.to(torch.bfloat16), logits.amax(-1), lse.masked_fill(lse == float("-inf"), float("inf"))
