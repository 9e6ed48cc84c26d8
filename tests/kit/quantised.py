"""Writes a tiny random DeepSeek-V4 checkpoint as DeepSeek ships it: its names, its config keys, fp8 and MXFP4 bytes.

Beside the files it gives the exact value of every tensor, decoded from the bytes by the definition of each format and
not by the package's own code. Weights are random bytes: every code of both formats occurs, except fp8's two NaNs.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

# No dimension but the number of heads is a multiple of 128, the experts' inputs are not even multiples of 32.
ODD_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 71,
    "hidden_size": 152,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 48,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 136,
    "o_groups": 2,
    "o_lora_rank": 72,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 44,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 0],  # the last one belongs to the MTP block
    "sliding_window": 32,
    "index_n_heads": 8,
    "index_head_dim": 24,
    "index_topk": 8,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "num_nextn_predict_layers": 1,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


@dataclass
class Recipe:
    """How the checkpoint is spelled on disk."""

    config: dict[str, Any] = field(default_factory=lambda: dict(ODD_CONFIG))
    quantise: bool = True
    scale_dtype: str = "F8_E8M0"  # or U8, F32
    scale_suffix: str = ".scale"  # or .weight_scale_inv
    packed_dtype: str = "I8"  # or U8, F4
    prefix: str = ""  # or model.
    files: int = 2
    mtp: bool = True
    seed: int = 0


@dataclass
class Written:
    """What was written: the folder, its raw tensors by stored name, and exact values by canonical name."""

    path: Path
    stored: dict[str, Tensor]
    values: dict[str, Tensor]


def write(path: Path, recipe: Recipe) -> Written:
    """Write the checkpoint and its index; returns what a reader must find."""
    rng = np.random.default_rng(recipe.seed)
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, (kind, shape) in tensor_list(recipe.config).items():
        if kind in ("fp8", "fp4") and recipe.quantise:
            weight, scale, exact = (_fp8 if kind == "fp8" else _mxfp4)(rng, recipe, *shape)
            stored[recipe.prefix + name] = weight
            stored[recipe.prefix + name.removesuffix(".weight") + recipe.scale_suffix] = scale
            values[name] = exact
        elif kind == "ids":
            rows = [rng.permutation(recipe.config["n_routed_experts"])[: shape[1]] for _ in range(shape[0])]
            stored[recipe.prefix + name] = values[name] = torch.from_numpy(np.stack(rows).astype(np.int64))
        else:
            random = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
            tensor = random.to(torch.bfloat16) if kind == "bf16" and recipe.quantise else random
            stored[recipe.prefix + name], values[name] = tensor, tensor.float()
    if recipe.mtp:
        stored["mtp.0.attn.wq_a.weight"] = torch.zeros(3, 3)
        stored["mtp.0.what.ever"] = torch.zeros(2, dtype=torch.bool)
    save(path, recipe.config, stored, recipe.files)
    return Written(path, stored, values)


def save(path: Path, config: dict[str, Any], stored: dict[str, Tensor], files: int) -> None:
    """Write config, safetensors files (one tensor in turn to each) and, for more than one file, their index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors" if files > 1 else "model.safetensors"
        part = dict(list(stored.items())[number::files])
        save_file(part, path / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    if files > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def tensor_list(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor of DeepSeek's checkpoint with its kind on disk and its (unpacked) shape, written out by hand."""
    hidden, hc = config["hidden_size"], config["hc_mult"]
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "embed.weight": ("bf16", (config["vocab_size"], hidden)),
        "head.weight": ("bf16", (config["vocab_size"], hidden)),
        "norm.weight": ("bf16", (hidden,)),
        "hc_head_fn": ("f32", (hc, hc * hidden)),
        "hc_head_base": ("f32", (hc,)),
        "hc_head_scale": ("f32", (1,)),
    }
    for layer in range(config["num_hidden_layers"]):
        parts = _attention(config, config["compress_ratios"][layer]) | _moe(config, layer < config["num_hash_layers"])
        for block in ("attn", "ffn"):
            parts[f"{block}_norm.weight"] = ("bf16", (hidden,))
            parts[f"hc_{block}_fn"] = ("f32", ((2 + hc) * hc, hc * hidden))
            parts[f"hc_{block}_base"] = ("f32", ((2 + hc) * hc,))
            parts[f"hc_{block}_scale"] = ("f32", (3,))
        tensors |= {f"layers.{layer}.{name}": value for name, value in parts.items()}
    return tensors


def _attention(config: dict[str, Any], ratio: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    hidden, heads, width = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    rank, groups, out = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
    parts: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn.attn_sink": ("f32", (heads,)),
        "attn.wq_a.weight": ("fp8", (rank, hidden)),
        "attn.q_norm.weight": ("bf16", (rank,)),
        "attn.wq_b.weight": ("fp8", (heads * width, rank)),
        "attn.wkv.weight": ("fp8", (width, hidden)),
        "attn.kv_norm.weight": ("bf16", (width,)),
        "attn.wo_a.weight": ("fp8", (groups * out, heads // groups * width)),
        "attn.wo_b.weight": ("fp8", (hidden, groups * out)),
    }
    compressors = {"attn.compressor": (width, 2 if ratio == 4 else 1)} if ratio else {}
    if ratio == 4:
        index_heads, index_width = config["index_n_heads"], config["index_head_dim"]
        compressors["attn.indexer.compressor"] = (index_width, 2)
        parts["attn.indexer.wq_b.weight"] = ("fp8", (index_heads * index_width, rank))
        parts["attn.indexer.weights_proj.weight"] = ("bf16", (index_heads, hidden))
    for name, (channels, copies) in compressors.items():
        parts[f"{name}.wkv.weight"] = ("bf16", (copies * channels, hidden))
        parts[f"{name}.wgate.weight"] = ("bf16", (copies * channels, hidden))
        parts[f"{name}.norm.weight"] = ("bf16", (channels,))
        parts[f"{name}.ape"] = ("f32", (ratio, copies * channels))
    return parts


def _moe(config: dict[str, Any], hashed: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    parts: dict[str, tuple[str, tuple[int, ...]]] = {"ffn.gate.weight": ("bf16", (experts, hidden))}
    if hashed:
        parts["ffn.gate.tid2eid"] = ("ids", (config["vocab_size"], config["num_experts_per_tok"]))
    else:
        parts["ffn.gate.bias"] = ("f32", (experts,))
    for name, kind in [("shared_experts", "fp8")] + [(f"experts.{number}", "fp4") for number in range(experts)]:
        parts[f"ffn.{name}.w1.weight"] = (kind, (width, hidden))
        parts[f"ffn.{name}.w2.weight"] = (kind, (hidden, width))
        parts[f"ffn.{name}.w3.weight"] = (kind, (width, hidden))
    return parts


def e4m3_value(code: int) -> float:
    """The value of one fp8 byte: sign, four exponent bits with bias 7, three mantissa bits; NaN for all ones."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1_value(code: int) -> float:
    """The value of one fp4 nibble: sign, two exponent bits with bias 1, one mantissa bit."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def _fp8(rng: np.random.Generator, recipe: Recipe, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    codes = rng.integers(0, 255, (rows, columns), dtype=np.uint8)
    codes[codes == 0x7F] = 0x80
    scale, scales = _scales(rng, recipe, math.ceil(rows / 128), math.ceil(columns / 128))
    exact = np.empty((rows, columns), dtype=np.float32)
    for row in range(rows):
        for column in range(columns):
            exact[row, column] = _E4M3[codes[row, column]] * scales[row // 128, column // 128]
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), scale, torch.from_numpy(exact)


def _mxfp4(rng: np.random.Generator, recipe: Recipe, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    scale, scales = _scales(rng, recipe, rows, math.ceil(columns / 32))
    exact = np.empty((rows, columns), dtype=np.float32)
    packed = np.zeros((rows, columns // 2), dtype=np.uint8)
    for row in range(rows):
        for column in range(columns):
            exact[row, column] = _E2M1[codes[row, column]] * scales[row, column // 32]
            packed[row, column // 2] |= codes[row, column] << (4 if column % 2 else 0)
    dtype = {"I8": torch.int8, "U8": torch.uint8, "F4": torch.float4_e2m1fn_x2}[recipe.packed_dtype]
    return torch.from_numpy(packed).view(dtype), scale, torch.from_numpy(exact)


def _scales(rng: np.random.Generator, recipe: Recipe, *shape: int) -> tuple[Tensor, np.ndarray[Any, Any]]:
    if recipe.scale_dtype == "F32":
        values = rng.uniform(0.001, 0.1, shape).astype(np.float32)
        return torch.from_numpy(values), values
    codes = rng.integers(112, 131, shape, dtype=np.uint8)
    stored = torch.from_numpy(codes)
    values = (2.0 ** (codes.astype(np.float64) - 127)).astype(np.float32)
    return stored if recipe.scale_dtype == "U8" else stored.view(torch.float8_e8m0fnu), values


_E4M3 = np.array([e4m3_value(code) for code in range(256)], dtype=np.float32)
_E2M1 = np.array([e2m1_value(code) for code in range(16)], dtype=np.float32)
