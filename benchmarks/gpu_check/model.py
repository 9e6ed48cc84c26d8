"""A model of random weights made directly on the device, with the geometry of DeepSeek-V4-Flash and fewer experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from redknot.model.geometry import Geometry, geometry_from_config
from redknot.model.names import expected_shapes
from redknot.model.published import published_config
from redknot.model.weights import build_model
from redknot.runtime.model import Model

EXPERTS = 16
TOY_LAYERS = 8  # three fences on either side, and two layers between them
# The kinds, ratios and rules of Flash at sizes that a CPU's interpreter runs.
TOY: dict[str, Any] = {
    "num_hidden_layers": TOY_LAYERS,
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "head_dim": 48,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 32,
    "sliding_window": 32,
    "max_position_embeddings": 8192,
}
_FLOAT32 = ("hc_attn", "hc_ffn", "hc_head", "attn_sink", "gate.bias")  # what checkpoints keep in float32


def flash(layers: int | None = None) -> Geometry:
    """Flash with 16 experts, all its layers or the first few."""
    config = published_config("flash") | {"n_routed_experts": EXPERTS}
    return geometry_from_config(config if layers is None else config | {"num_hidden_layers": layers})


def toy() -> Geometry:
    """The toy."""
    return geometry_from_config(published_config("flash") | TOY)


class RandomSource:
    """A ``TensorSource`` of normal numbers, scaled so that streams stay finite."""

    def __init__(self, g: Geometry, device: torch.device, dtype: torch.dtype) -> None:
        self.g, self._device, self._dtype = g, device, dtype
        self._shapes = expected_shapes(g, range(g.num_layers))
        self._generator = torch.Generator(device).manual_seed(0)

    def tensor(self, name: str) -> Tensor:
        """A tensor by its canonical name."""
        shape = self._shapes[name]
        if name.endswith("tid2eid"):
            scores = torch.rand(shape[0], self.g.num_experts, generator=self._generator, device=self._device)
            return scores.argsort(-1)[:, : self.g.experts_per_token].contiguous()
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        kept = any(part in name for part in _FLOAT32)
        return self._normal(shape, torch.float32 if kept else self._dtype)

    def experts(self, layer: int, part: slice) -> tuple[Tensor, Tensor]:
        """Routed experts of a layer."""
        shapes = (self._shapes[f"layers.{layer}.ffn.experts.{name}"] for name in ("w13", "w2"))
        w13, w2 = (self._normal((part.stop - part.start, *shape[1:]), self._dtype) for shape in shapes)
        return w13, w2

    def _normal(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=self._device)
        return made.normal_(std=shape[-1] ** -0.5, generator=self._generator)


def random_model(g: Geometry, device: torch.device, dtype: torch.dtype) -> Model:
    """A model of random weights on a device."""
    return Model(g, build_model(RandomSource(g, device, dtype), g), **on(device))


def on(device: torch.device) -> dict[str, torch.device]:
    """The keyword that puts a model or its latents on a device; the CPU is where they lie without it."""
    return {} if device.type == "cpu" else {"device": device}


def weight_bytes(g: Geometry, dtype: torch.dtype) -> int:
    """Bytes of a model's weights, the copies of output projections that its first forward makes included."""
    numbers = sum(math.prod(shape) for shape in expected_shapes(g, range(g.num_layers)).values())
    copies = g.num_layers * g.num_heads * g.head_dim * g.o_lora_rank
    return (numbers + copies) * dtype.itemsize


def runnable_dtype(device: torch.device, check: Any) -> tuple[torch.dtype, str]:
    """bf16 where ``check(model)`` runs a toy of it on the device, else float32 and why not."""
    try:
        check(random_model(toy(), device, torch.bfloat16))
    except Exception as error:  # noqa: BLE001  # whatever it is, the reason is reported and float32 runs
        return torch.float32, f"the engine does not run bf16 weights here: {type(error).__name__}: {error}"[:500]
    return torch.bfloat16, ""


def fewer_layers(g: Geometry, layers: int) -> Geometry:
    """The same model with only its first layers."""
    return replace(g, kinds=g.kinds[:layers], hash_layers=g.hash_layers[:layers])
