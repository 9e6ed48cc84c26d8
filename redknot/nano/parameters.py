"""nano's geometry, its trainable parameters under canonical names, and their files.

All layers' parameters exist from the start; a training phase runs a subset of the layers. A layer that has never
run is close to the identity (its output projections are zero), so layers can join later.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from redknot.model.geometry import Geometry, LayerKind, geometry_from_config
from redknot.ops.rope import inverse_frequencies

_KINDS = [LayerKind.SLIDING, LayerKind.SLIDING, *([LayerKind.HCA, LayerKind.CSA] * 5)]
_ROPE = {"partial_rotary_factor": 0.125}

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "bfloat16",
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_hidden_layers": len(_KINDS),
    "layer_types": [str(kind) for kind in _KINDS],
    "compress_rates": {str(LayerKind.CSA): 4, str(LayerKind.HCA): 32},
    "mlp_layer_types": ["hash_moe", *(["moe"] * (len(_KINDS) - 1))],
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 64,
    "sliding_window": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 64,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 6,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.125,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000.0, **_ROPE},
        "compress": {
            "rope_type": "yarn",
            "rope_theta": 160000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "attention_factor": 1.0,
            **_ROPE,
        },
    },
    "max_position_embeddings": 65536,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
"""nano's ``config.json``, in the spelling that ``transformers`` reads (it maps only the ratios 0, 4 and 128)."""

GEOMETRY = geometry_from_config(CONFIG)


def subset_geometry(layers: tuple[int, ...]) -> Geometry:
    """nano's geometry with only some of its layers, in their order."""
    config = dict(CONFIG, num_hidden_layers=len(layers))
    for key in ("layer_types", "mlp_layer_types"):
        config[key] = [CONFIG[key][layer] for layer in layers]
    return geometry_from_config(config)


class Parameters:
    """Leaf tensors by canonical name; a TensorSource over the layers that a phase runs."""

    def __init__(self, tensors: dict[str, Tensor], layers: tuple[int, ...] | None = None) -> None:
        self.tensors = tensors
        self.layers = layers or tuple(range(GEOMETRY.num_layers))

    def names(self) -> list[str]:
        """Names of the tensors in use by the layers that run."""
        prefixes = tuple(f"layers.{layer}." for layer in self.layers)
        return [name for name in self.tensors if not name.startswith("layers.") or name.startswith(prefixes)]

    def tensor(self, name: str) -> Tensor:
        """A tensor, its layer number counted among those that run."""
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            name = f"layers.{self.layers[int(layer)]}.{rest}"
        return self.tensors[name]

    def experts(self, layer: int, part: slice) -> tuple[Tensor, Tensor]:
        """Routed experts as :class:`redknot.model.weights.TensorSource` asks for them."""
        prefix = f"layers.{layer}.ffn.experts"
        one, two, three = (
            torch.stack([self.tensor(f"{prefix}.{e}.w{i}.weight") for e in range(part.start, part.stop)])
            for i in (1, 2, 3)
        )
        return torch.cat((one, three), dim=1), two


def initial_tensors(generator: torch.Generator) -> dict[str, Tensor]:
    """Fresh parameters and routing tables; output projections and experts' down-projections are zero."""
    g = GEOMETRY

    def matrix(rows: int, columns: int) -> Tensor:
        # As transformers initialises it. Muon's steps have unit spectral norm: larger matrices would turn too slowly.
        return torch.randn(rows, columns, generator=generator) * 0.02

    embed = torch.randn(g.vocab_size, g.hidden_size, generator=generator)
    # V4 has no biases: one constant channel gives every layer something to derive them from.
    constant = torch.cat((torch.full((g.vocab_size, 1), 5.0), embed[:, 1:]), dim=1)
    tensors = {
        "embed.weight": constant * 0.02,
        # Aligned with the embedding: a linear map cannot copy 2,048 random vectors onto 2,048 other random ones.
        "head.weight": embed * 0.02,
        "norm.weight": torch.ones(g.hidden_size),
        "hc_head_fn": matrix(g.hc_mult, g.hc_mult * g.hidden_size),
        "hc_head_base": torch.zeros(g.hc_mult),
        "hc_head_scale": torch.ones(1),
    }
    for layer in range(g.num_layers):
        for name, value in _layer_tensors(layer, matrix, generator).items():
            tensors[f"layers.{layer}.{name}"] = value
    return tensors


def _layer_tensors(layer: int, matrix: Any, generator: torch.Generator) -> dict[str, Tensor]:
    g, d, hidden = GEOMETRY, GEOMETRY.head_dim, GEOMETRY.hidden_size
    out = {"attn_norm.weight": torch.ones(hidden), "ffn_norm.weight": torch.ones(hidden)}
    for block in ("attn", "ffn"):
        rows = (2 + g.hc_mult) * g.hc_mult
        base = torch.randn(rows, generator=generator) * 0.3
        base[2 * g.hc_mult :] = 4.0 * torch.eye(g.hc_mult).flatten()
        out[f"hc_{block}_fn"] = matrix(rows, g.hc_mult * hidden)
        out[f"hc_{block}_base"] = base
        out[f"hc_{block}_scale"] = torch.ones(3)
    out |= {
        "attn.wq_a.weight": matrix(g.q_lora_rank, hidden),
        "attn.q_norm.weight": torch.ones(g.q_lora_rank),
        "attn.wq_b.weight": matrix(g.num_heads * d, g.q_lora_rank),
        "attn.wkv.weight": matrix(d, hidden),
        "attn.kv_norm.weight": torch.ones(d),
        "attn.attn_sink": torch.zeros(g.num_heads),
        "attn.wo_a.weight": matrix(g.o_groups * g.o_lora_rank, g.heads_per_group * d),
        "attn.wo_b.weight": matrix(hidden, g.o_groups * g.o_lora_rank),
    }
    if layer == 0:
        _look_back(out)
    kind = g.kinds[layer]
    if kind is not LayerKind.SLIDING:
        series = 2 if kind is LayerKind.CSA else 1
        out |= _compressor_tensors("attn.compressor", series * d, d, g.ratio(layer), matrix)
    if kind is LayerKind.CSA:
        width = g.index_head_dim
        out |= _compressor_tensors("attn.indexer.compressor", 2 * width, width, g.csa_ratio, matrix)
        out["attn.indexer.wq_b.weight"] = matrix(g.index_heads * g.index_head_dim, g.q_lora_rank)
        out["attn.indexer.weights_proj.weight"] = matrix(g.index_heads, hidden)
    return out | _moe_tensors(layer, matrix, generator)


def _look_back(out: dict[str, Tensor]) -> None:
    """Make the heads of the first output group attend to the tokens 1, 2, ... before their own.

    Rows of the latent turned with the position read the constant channel; each head's query is that same vector,
    turned back by its distance. The three highest frequencies tell 32 positions apart.
    """
    g = GEOMETRY
    frequencies = inverse_frequencies(g.rope_main, g.rope_dim)[:3].tolist()
    first = g.head_dim - g.rope_dim
    latent, down, up = (out[f"attn.{name}.weight"] for name in ("wkv", "wq_a", "wq_b"))
    latent[first:] = 0
    latent[[first, first + 2, first + 4], 0] = 0.5
    down[0] = 0
    down[0, 0] = 0.3
    for head in range(g.heads_per_group):
        rows = up[head * g.head_dim : (head + 1) * g.head_dim]
        rows.zero_()
        for pair, frequency in enumerate(frequencies):
            angle = -frequency * (head + 1)
            rows[first + 2 * pair, 0] = 0.1 * math.cos(angle)
            rows[first + 2 * pair + 1, 0] = 0.1 * math.sin(angle)


def _compressor_tensors(prefix: str, width: int, d: int, ratio: int, matrix: Any) -> dict[str, Tensor]:
    return {
        f"{prefix}.wkv.weight": matrix(width, GEOMETRY.hidden_size),
        f"{prefix}.wgate.weight": matrix(width, GEOMETRY.hidden_size),
        f"{prefix}.ape": torch.zeros(ratio, width),
        f"{prefix}.norm.weight": torch.ones(d),
    }


def _moe_tensors(layer: int, matrix: Any, generator: torch.Generator) -> dict[str, Tensor]:
    g, hidden, width = GEOMETRY, GEOMETRY.hidden_size, GEOMETRY.expert_width
    out = {"ffn.gate.weight": matrix(g.num_experts, hidden)}
    if g.hash_layers[layer]:
        order = torch.rand(g.vocab_size, g.num_experts, generator=generator).argsort(dim=-1)
        out["ffn.gate.tid2eid"] = order[:, : g.experts_per_token].contiguous()
    else:
        out["ffn.gate.bias"] = torch.zeros(g.num_experts)
    for name in ("shared_experts", *(f"experts.{expert}" for expert in range(g.num_experts))):
        out[f"ffn.{name}.w1.weight"] = matrix(width, hidden)
        out[f"ffn.{name}.w2.weight"] = matrix(hidden, width)
        out[f"ffn.{name}.w3.weight"] = matrix(width, hidden)
    return out


def save_checkpoint(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write the model files: DeepSeek's tensor names, matrices in bf16, small float32 parameters kept."""
    folder.mkdir(parents=True, exist_ok=True)
    half = {
        name: value.detach().to(torch.bfloat16 if value.dim() == 2 and _halves(name) else value.dtype).contiguous()
        for name, value in tensors.items()
    }
    save_file(half, folder / "model.safetensors.tmp", metadata={"format": "pt"})
    (folder / "model.safetensors.tmp").replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Read back what :func:`save_checkpoint` wrote, as float32 training leaves."""
    loaded = load_file(folder / "model.safetensors")
    return {name: value if value.dtype == torch.int64 else value.float() for name, value in loaded.items()}


def _halves(name: str) -> bool:
    return name.endswith(".weight")
