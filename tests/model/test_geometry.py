"""Geometry from config.json: DeepSeek's published keys, transformers' keys, and every value that is refused."""

from __future__ import annotations

import json
import math
import reprlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from redknot.errors import ConfigError, RedKnotError, UnsupportedModelError
from redknot.model.geometry import Geometry, LayerKind, geometry_from_config, load_geometry
from redknot.model.published import published_config
from redknot.model.ropespec import RopeSpec, YarnScaling

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
        ({"hidden_size": 0}, "hidden_size is 0; it must be a whole number from 1 to 2147483647"),
        ({"o_groups": 0}, "o_groups is 0"),
        ({"o_groups": 7}, "must divide into o_groups"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 45}, "44 layer kinds for num_hidden_layers 45"),
        ({"compress_ratios": None}, "compress_ratios is missing"),
        ({"mlp_layer_types": ["moe"] * 42}, "same length"),
        ({"qk_rope_head_dim": 63}, "must be even"),
        ({"qk_rope_head_dim": 256}, "at most head_dim"),
        ({"num_experts_per_tok": 257}, "must not exceed"),
        ({"scoring_func": "relu"}, "scoring_func"),
        ({"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": "16"}}, r"rope_scaling\.factor is '16'; it must be a number"),
    ],
)
def test_inconsistent_values(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        geometry_from_config(FLASH | change)
    assert "\n" not in str(caught.value)


DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]
COUNTS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups"),
    *("o_lora_rank", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "sliding_window"),
    *("index_n_heads", "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings"),
    *("qk_rope_head_dim", "compress_rate_csa", "compress_rate_hca"),
)
NUMBERS = (
    *("rms_norm_eps", "hc_eps", "rope_theta", "compress_rope_theta", "routed_scaling_factor", "swiglu_limit"),
    "partial_rotary_factor",
)
NO_COUNT = (0, -4, 4096.0, 0.5, True, "128", "", [128], {}, math.nan, math.inf, 10**30, DEEP)
NO_NUMBER = (0, -1e-6, True, "1e-6", "", [1.0], {}, math.nan, math.inf, -math.inf, 10**400, 1e300, DEEP)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in COUNTS for value in NO_COUNT),
        *((key, value) for key in NUMBERS for value in NO_NUMBER),
        *((key, value) for key in ("rope_theta", "compress_rope_theta") for value in (0.5, 1)),
        ("partial_rotary_factor", 1.5),
        ("hc_sinkhorn_iters", 1001),  # what no shape of a tensor contradicts, and what would take all memory or time
        ("sliding_window", 65537),
        ("n_routed_experts", 4097),
        *(("num_hash_layers", value) for value in (-1, "3", 1.5, math.nan)),
        *(("tie_word_embeddings", value) for value in ("false", 0, [])),
        *(("bos_token_id", value) for value in (-1, 129280, "0", 0.0, True, [0])),
        *(("eos_token_id", value) for value in (-1, 129280, "1", 1.0, True, ["1"], [1, -1], [[1]], {"id": 1})),
        *((key, 3) for key in ("text_config", "compress_rates", "rope_parameters", "rope_scaling")),
        *((key, value) for key in ("layer_types", "mlp_layer_types") for value in ("abc", 5, [5], [["moe"]], {})),
        *(("compress_ratios", value) for value in (5, "044", ["4"], [4.0], [[4]], [math.nan])),
    ],
    ids=lambda value: str(value)[:20] if value is not DEEP else "deep",
)
def test_odd_values_name_key_and_value(key: str, value: Any) -> None:
    """Never a traceback, and never another number than the file says: 1.5 layers are not one, "false" is not true."""
    with pytest.raises(ConfigError, match=rf"config\.json: {key} is ") as caught:
        geometry_from_config(FLASH | {key: value})
    message = str(caught.value)
    assert reprlib.repr(value) in message
    assert "; it must be " in message
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings", "beta_fast", "beta_slow"])
@pytest.mark.parametrize("value", [0, -16, "16", math.nan, math.inf, [16]])
def test_odd_values_of_scaling(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: rope_scaling\.{key} is "):
        geometry_from_config(FLASH | {"rope_scaling": FLASH["rope_scaling"] | {key: value}})


@pytest.mark.parametrize("key", [*FLASH, "layer_types", "mlp_layer_types", "rope_parameters", "text_config"])
@pytest.mark.parametrize("value", [DEEP, "x" * 10_000, math.nan, -1, [], {}, [None], {"main": 1}, 10**4000])
def test_any_value_anywhere_is_one_line_or_fine(key: str, value: Any) -> None:
    said = ""
    try:
        geometry_from_config(FLASH | {key: value})
    except RedKnotError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 300


@pytest.mark.parametrize(
    ("value", "ids"), [(5, (5,)), ([5], (5,)), ([1, 7, 129279], (1, 7, 129279)), ([], ()), (None, ())]
)
def test_one_end_or_several(value: Any, ids: tuple[int, ...]) -> None:
    assert geometry_from_config(FLASH | {"eos_token_id": value}).eos_token_ids == ids


def test_no_beginning() -> None:
    assert geometry_from_config(FLASH | {"bos_token_id": None}).bos_token_id is None
    assert geometry_from_config({key: FLASH[key] for key in FLASH if key != "bos_token_id"}).bos_token_id == 0


@pytest.mark.parametrize("levels", [33, 200, 100_000])
def test_a_deeply_nested_file_is_one_line(tmp_path: Path, levels: int) -> None:
    """Too deep for the reader of JSON or, short of that, for whoever would show the value."""
    deep = '{"hidden_size": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"
    (tmp_path / "config.json").write_text(deep)
    with pytest.raises(RedKnotError, match=r"nested more than 32 levels|not readable as JSON") as caught:
        load_geometry(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert "\n" not in str(caught.value)


def test_as_deep_as_a_file_may_be(tmp_path: Path) -> None:
    deep = json.loads("[" * 31 + "]" * 31)
    (tmp_path / "config.json").write_text(json.dumps(FLASH | {"extra": deep}))
    assert load_geometry(tmp_path) == geometry_from_config(FLASH)


def test_geometry_needs_no_torch() -> None:
    code = "import sys, redknot.model.geometry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
