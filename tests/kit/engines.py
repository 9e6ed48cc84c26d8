"""A checkpoint so small that Triton's interpreter runs whole requests over it: four layers, blocks of 8 tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from redknot.model.geometry import geometry_from_config
from redknot.model.names import expected_shapes
from redknot.nano import parameters
from tests.kit.requests import ROOT, _random
from tests.kit.tiny import C, H, S

KINDS = (S, C, H, C)
SMALLEST = {
    "hidden_size": 32,
    "num_hidden_layers": len(KINDS),
    "layer_types": [str(kind) for kind in KINDS],
    "mlp_layer_types": ["hash_moe", *["moe"] * (len(KINDS) - 1)],
    "compress_rates": {str(C): 4, str(H): 8},
    "sliding_window": 8,
    "num_attention_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "partial_rotary_factor": 0.25,
    "hc_sinkhorn_iters": 3,
    "max_position_embeddings": 512,
}


def write_smallest(folder: Path, seed: int = 0) -> Path:
    """Random weights, nano's tokenizer; the indexer drops entries as soon as there are more than 4."""
    folder.mkdir(parents=True)
    rope = {
        kind: values | {"partial_rotary_factor": SMALLEST["partial_rotary_factor"]}
        for kind, values in parameters.CONFIG["rope_parameters"].items()
    }
    config = parameters.CONFIG | SMALLEST | {"rope_parameters": rope}
    geometry, generator = geometry_from_config(config), torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(geometry).items():
        if name.endswith("tid2eid"):
            chosen = torch.rand(shape[0], geometry.num_experts, generator=generator).argsort(-1)
            tensors[name] = chosen[:, : shape[1]].contiguous()
        else:
            tensors[name] = _random(name, torch.zeros(shape), generator)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(ROOT / "models/nano/tokenizer.json", folder)
    return folder
