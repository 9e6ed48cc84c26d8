"""Tiny models of any layer kinds, ratios and top-k, made in a moment: for counting work, not for what they compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from redknot.model.geometry import Geometry, LayerKind, geometry_from_config
from redknot.model.weights import build_model
from redknot.runtime.model import Model

S, C, H = LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA
TINY: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 50,
    "hidden_size": 12,
    "num_attention_heads": 4,
    "head_dim": 8,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 6,
    "o_groups": 2,
    "o_lora_rank": 5,
    "n_routed_experts": 4,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 7,
    "index_n_heads": 3,
    "index_head_dim": 6,
    "hc_mult": 2,
}
# layer kinds, CSA and HCA ratios, window, top-k, hash layers
SHAPES: dict[str, tuple[tuple[LayerKind, ...], int, int, int, int, int]] = {
    "nano": ((S, C, H, C), 4, 32, 32, 8, 1),
    "flash": ((S, H, C), 4, 128, 128, 16, 3),
    "odd": ((C, S, H), 3, 20, 17, 5, 0),
    "one": ((C,), 2, 8, 1, 1, 0),
    "sliding": ((S, S), 4, 128, 24, 512, 1),
}


class Random:
    """Weights of any shape that the names ask for, small enough to stay finite."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def tensor(self, name: str) -> Tensor:
        if name.endswith("tid2eid"):
            return torch.rand(self.geometry.vocab_size, 4).argsort(-1)[:, : self.geometry.experts_per_token]
        return 0.3 * torch.randn(self._shape(name))

    def experts(self, layer: int, part: slice) -> tuple[Tensor, Tensor]:
        count, width, hidden = part.stop - part.start, self.geometry.expert_width, self.geometry.hidden_size
        return torch.randn(count, 2 * width, hidden), torch.randn(count, hidden, width)

    def _shape(self, name: str) -> tuple[int, ...]:
        g = self.geometry
        streams = g.hc_mult * g.hidden_size
        parts = name.split(".")
        indexed = "indexer" in parts
        kind = g.kinds[int(parts[1])] if parts[0] == "layers" else S
        twice = 2 if kind is C else 1
        d = g.index_head_dim if indexed else g.head_dim
        if "compressor" in parts:
            ratio = g.csa_ratio if kind is C else g.hca_ratio
            shapes = {"wkv": (twice * d, g.hidden_size), "ape": (ratio, twice * d), "norm": (d,)}
            return shapes["wkv" if parts[-2] == "wgate" else parts[-1] if parts[-1] == "ape" else parts[-2]]
        by_ending: dict[str, tuple[int, ...]] = {
            "embed.weight": (g.vocab_size, g.hidden_size),
            "head.weight": (g.vocab_size, g.hidden_size),
            "hc_head_fn": (g.hc_mult, streams),
            "hc_head_base": (g.hc_mult,),
            "hc_head_scale": (1,),
            "_fn": ((2 + g.hc_mult) * g.hc_mult, streams),
            "_base": ((2 + g.hc_mult) * g.hc_mult,),
            "_scale": (3,),
            "wkv.weight": (g.head_dim, g.hidden_size),
            "wq_a.weight": (g.q_lora_rank, g.hidden_size),
            "weights_proj.weight": (g.index_heads, g.hidden_size),
            "indexer.wq_b.weight": (g.index_heads * g.index_head_dim, g.q_lora_rank),
            "wq_b.weight": (g.num_heads * g.head_dim, g.q_lora_rank),
            "wo_a.weight": (g.o_groups * g.o_lora_rank, g.heads_per_group * g.head_dim),
            "wo_b.weight": (g.hidden_size, g.o_groups * g.o_lora_rank),
            "attn_sink": (g.num_heads,),
            "q_norm.weight": (g.q_lora_rank,),
            "kv_norm.weight": (g.head_dim,),
            "norm.weight": (g.hidden_size,),
            "gate.weight": (g.num_experts, g.hidden_size),
            "gate.bias": (g.num_experts,),
            "w2.weight": (g.hidden_size, g.expert_width),
            "w1.weight": (g.expert_width, g.hidden_size),
            "w3.weight": (g.expert_width, g.hidden_size),
        }
        return next(shape for ending, shape in by_ending.items() if name.endswith(ending))


def geometry_of(shape: str) -> Geometry:
    kinds, csa, hca, window, topk, hashed = SHAPES[shape]
    layers = len(kinds)
    hash_types = ["hash_moe" if layer < hashed else "moe" for layer in range(layers)]
    more = {"num_hidden_layers": layers, "layer_types": list(kinds), "mlp_layer_types": hash_types}
    rates = {"compress_rates": {C: csa, H: hca}, "sliding_window": window, "index_topk": topk}
    return geometry_from_config(TINY | more | rates)


def tiny_model(shape: str) -> Model:
    """A model of one of ``SHAPES``, with random weights."""
    geometry = geometry_of(shape)
    return Model(geometry, build_model(Random(geometry), geometry))
