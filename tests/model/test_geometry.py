"""Geometry from config.json: DeepSeek's published keys, transformers' keys, and every value that is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from redknot.errors import CheckpointError, UnsupportedModelError
from redknot.model.geometry import Geometry, LayerKind, RopeSpec, YarnScaling, geometry_from_config
from redknot.model.published import published_config

FLASH: dict[str, Any] = published_config("flash")
PRO: dict[str, Any] = published_config("pro")


def kinds(geometry: Geometry) -> tuple[int, int, int]:
    sliding, csa, hca = (geometry.kinds.count(kind) for kind in LayerKind)
    return sliding, csa, hca


def test_flash() -> None:
    geometry = geometry_from_config(FLASH)
    assert (geometry.num_layers, geometry.hidden_size, geometry.vocab_size) == (43, 4096, 129280)
    assert (geometry.num_heads, geometry.head_dim, geometry.rope_dim, geometry.heads_per_group) == (64, 512, 64, 8)
    assert kinds(geometry) == (2, 21, 20)
    assert [geometry.ratio(layer) for layer in (0, 1, 2, 3, 41, 42)] == [0, 0, 4, 128, 128, 4]
    assert geometry.block_length == 128
    assert geometry.hash_layers == (True,) * 3 + (False,) * 40
    assert geometry.rope(1) == RopeSpec(10000.0)
    assert geometry.rope(2) == RopeSpec(160000.0, YarnScaling(16.0, 65536, 32.0, 1.0))
    assert (geometry.scoring, geometry.routed_scale, geometry.experts_per_token) == ("sqrtsoftplus", 1.5, 6)
    assert (geometry.bos_token_id, geometry.eos_token_ids) == (0, (1,))


def test_pro() -> None:
    geometry = geometry_from_config(PRO)
    assert kinds(geometry) == (0, 30, 31)
    assert (geometry.num_heads, geometry.o_groups, geometry.heads_per_group) == (128, 16, 8)
    assert (geometry.index_heads, geometry.index_head_dim, geometry.index_topk) == (64, 128, 1024)
    assert geometry.shardable() == {"output groups": 16, "routed experts": 384, "shared expert width": 3072}


@pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])
def test_both_spellings_are_one_geometry(config: dict[str, Any]) -> None:
    from transformers.models.deepseek_v4 import DeepseekV4Config

    saved = DeepseekV4Config(**config).to_dict()
    for key in ("compress_ratios", "num_hash_layers", "rope_scaling"):
        assert key not in saved
    assert geometry_from_config(saved) == geometry_from_config(config)


def test_ratios_other_than_deepseeks() -> None:
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32}
    ratios = [0, 4, 32]
    geometry = geometry_from_config(
        FLASH | {"num_hidden_layers": 3, "compress_ratios": ratios, "compress_rates": rates}
    )
    assert [geometry.ratio(layer) for layer in range(3)] == ratios
    assert geometry.block_length == 32
    scalar = FLASH | {"num_hidden_layers": 3, "compress_ratios": ratios, "compress_rate_hca": 32}
    assert geometry_from_config(scalar) == geometry


def test_identity_fields_are_plain_json() -> None:
    import json

    first, second = (geometry_from_config(FLASH | {"index_topk": topk}).identity_fields() for topk in (512, 256))
    assert [name for name in first if first[name] != second[name]] == ["index_topk"]
    assert json.loads(json.dumps(first))["rope_compress"]["yarn"]["factor"] == 16.0


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "deepseek_v41"},
        {"model_type": "deepseek_v4_1"},
        {"model_type": "deepseek_v4.1"},
        {"architectures": ["DeepseekV41ForCausalLM"]},
        {"kv_source_layer_ids": [2, 8]},
        {"model_type": "deepseek_v41", "text_config": {"hidden_size": 5120}},
        {"text_config": {"engram_layer_ids": [1, 14]}},
    ],
)
def test_v41_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"DeepSeek-V4\.1 has another layout"):
        geometry_from_config(FLASH | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "deepseek_v3"}, "'deepseek_v3'"),
        ({"model_type": "llama"}, "'llama'"),
        ({"model_type": None}, "None"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"norm_topk_prob": False}, "norm_topk_prob False"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8"),
        ({"n_shared_experts": 2}, "n_shared_experts 2"),
        ({"layer_types": ["full_attention"] * 43}, "full_attention"),
        ({"mlp_layer_types": ["dense"] * 43}, "dense"),
        ({"compress_ratios": [0, 2] * 22}, r"compress_ratios \[2\]"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": FLASH["rope_scaling"] | {"attention_factor": 1.2}}, "attention_factor 1.2"),
        ({"rope_scaling": FLASH["rope_scaling"] | {"truncate": False}}, "truncate False"),
    ],
)
def test_other_arithmetic_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        geometry_from_config(FLASH | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "wide"}, "wrong type"),
        ({"hidden_size": [4096]}, "wrong type"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be positive"),
        ({"o_groups": 0}, "o_groups is 0"),
        ({"o_groups": 7}, "must divide into o_groups"),
        ({"num_hidden_layers": 0}, "for num_hidden_layers 0"),
        ({"num_hidden_layers": -1}, "for num_hidden_layers -1"),
        ({"num_hidden_layers": 45}, "44 layer kinds for num_hidden_layers 45"),
        ({"compress_ratios": None}, "compress_ratios is missing"),
        ({"mlp_layer_types": ["moe"] * 42}, "same length"),
        ({"qk_rope_head_dim": 63}, "must be even"),
        ({"qk_rope_head_dim": 256}, "at most head_dim"),
        ({"num_experts_per_tok": 257}, "must not exceed"),
        ({"scoring_func": "relu"}, "scoring_func"),
        ({"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        ({"text_config": 3}, "wrong type"),
    ],
)
def test_inconsistent_values(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        geometry_from_config(FLASH | change)
    assert "\n" not in str(caught.value)


def test_geometry_needs_no_torch() -> None:
    code = "import sys, redknot.model.geometry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
