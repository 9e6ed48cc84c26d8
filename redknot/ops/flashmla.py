"""Segment attention by FlashMLA's sparse prefill, where it is installed and the device fits. Unverified on hardware.

What it promises (github.com/deepseek-ai/FlashMLA at 9241ae3: ``flash_mla/flash_mla_interface.py``, ``tests/ref.py``,
``csrc/api/sparse_fwd.h``): bf16 queries [s_q, 64 or 128, 512] over one bf16 latent [s_kv, 1, 512], which is key and
value; int32 indices [s_q, 1, k], k a multiple of 128, of which those below 0 or from s_kv on are skipped; returns
(output bf16, maxima, LSE), the LSE a natural logarithm, +inf where a row saw nothing. Its README still writes base 2,
which was so before the argument ``attn_sink``: a module without it is refused. The sink is not given to the kernel: it
enters once, when the parts of a row merge.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from redknot.ops.attention import Partial
from redknot.ops.records import Records
from redknot.ops.rope import Rotation, rotate

MODULE, FUNCTION = "flash_mla", "flash_mla_sparse_fwd"
PARAMETERS = ("q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length")
HEADS, CHANNELS = (64, 128), 512
MULTIPLE = 128  # of the indices of a row: two blocks of 64 (``csrc/sm90/prefill/sparse/phase1.cuh``)


def module_refusal() -> str:
    """Why the module that is installed cannot be used, in words; empty where it can."""
    if find_spec(MODULE) is None:
        return f"{MODULE} is not installed"
    try:
        function = _function()
        found = tuple(inspect.signature(function).parameters)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"{MODULE} has no {FUNCTION} that can be looked at ({' '.join(str(error).split())})"
    if found != PARAMETERS:
        return f"{FUNCTION} takes ({', '.join(found)}), known is ({', '.join(PARAMETERS)})"
    return ""


def device_refusal(device: str, capability: tuple[int, int] | None) -> str:
    """Why a device cannot run it: sm_90 and the family of sm_100 can."""
    if device != "cuda" or capability is None:
        return f"device {device} is no CUDA device"
    if capability != (9, 0) and capability[0] != 10:
        return f"compute capability {capability[0]}.{capability[1]} is neither 9.0 nor 10.x"
    return ""


def shape_refusal(dtype: torch.dtype, channels: int, heads: int, *, packed: bool) -> str:
    """Why it cannot serve queries of this dtype and shape over such latents."""
    if packed:
        return "packed rows are not read by its prefill"
    if dtype != torch.bfloat16:
        return f"dtype {str(dtype).removeprefix('torch.')} is not bfloat16"
    if channels != CHANNELS:
        return f"{channels} channels are not {CHANNELS}"
    if heads not in HEADS:
        return f"{heads} heads are not {' or '.join(map(str, HEADS))}"
    return ""


def segment_attention(q: Tensor, rotation: Rotation | None, keys: Tensor | Records, indices: Tensor) -> Partial:
    """As :func:`redknot.ops.segment.segment_attention`, of bf16 ``q`` and ``keys``; the output is rounded to bf16.

    A row of fewer heads (Global ones alone) is filled up to what the kernel takes, with queries of zeros.
    """
    assert isinstance(keys, Tensor)  # ``shape_refusal`` lets no packed ones pass
    rows, heads, _ = q.shape
    held = len(keys)
    if not rows or not held or not indices.shape[1]:
        nothing = torch.zeros(q.shape, device=q.device)
        return Partial(nothing, torch.full((rows, heads), float("-inf"), device=q.device))
    seen = (indices >= 0) & (indices < held)  # before they are cut to 32 bits
    chosen = torch.where(seen, indices, -1).to(torch.int32)
    chosen = pad(chosen, (0, -indices.shape[1] % MULTIPLE), value=-1)
    # What lies behind a row's last entry costs nothing. At least one: no block at all is no documented case.
    number = torch.arange(1, seen.shape[1] + 1, device=q.device)
    length = torch.where(seen, number, 1).amax(-1).to(torch.int32)
    turned = q if rotation is None else rotate(q.float(), rotation).to(q.dtype)
    turned = pad(turned, (0, 0, 0, next(most for most in HEADS if most >= heads) - heads))
    output, _, lse = _function()(
        q=turned.contiguous(),
        kv=keys.unsqueeze(1),
        indices=chosen.unsqueeze(1),
        sm_scale=1.0,  # queries come scaled
        d_v=CHANNELS,
        attn_sink=None,
        topk_length=length,
    )
    lonely = ~seen.any(-1, keepdim=True)
    output = output[:, :heads].float().masked_fill(lonely.unsqueeze(-1), 0.0)
    if rotation is not None:
        output = rotate(output, rotation.inverse())
    return Partial(output, lse[:, :heads].masked_fill(lonely, float("-inf")))


def _function() -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(MODULE), FUNCTION)
    return function
