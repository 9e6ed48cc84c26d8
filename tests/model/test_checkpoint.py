"""Loading checkpoints: DeepSeek's quantised layout bit for bit, transformers' two spellings, and every refusal."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from redknot.comm.shard import Shard
from redknot.errors import CheckpointError, ConfigError, RedKnotError, UnsupportedModelError
from redknot.model.checkpoint import INDEX, Checkpoint, load_model
from redknot.model.geometry import load_geometry
from redknot.model.names import canonical_name
from redknot.model.weights import named_tensors
from tests.kit.quantised import ODD_CONFIG, Recipe, Written, save, write

TINY = {
    "vocab_size": 40,
    "hidden_size": 32,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 6,
    "sliding_window": 8,
    "o_groups": 2,
    "o_lora_rank": 8,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 4,
    "hc_mult": 2,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128],
    "qk_rope_head_dim": 8,
}


def checkpoint(path: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    return Checkpoint(path, load_geometry(path), dtype)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(tmp_path_factory.mktemp("odd"), Recipe())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random transformers model, every parameter and buffer randomised, and the folder it saved itself to."""
    from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**TINY)).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("tid2eid"):
                tensor.copy_(torch.stack([torch.randperm(8)[:6] for _ in range(tensor.shape[0])]))
            else:
                tensor.copy_(torch.randn_like(tensor))
    path = tmp_path_factory.mktemp("saved")
    model.save_pretrained(path, max_shard_size="100KB")
    return model, path


def assert_holds(source: Checkpoint, name: str, expected: Tensor) -> None:
    """That a tensor named as transformers' state dict names it is in the checkpoint, bit for bit."""
    canonical = canonical_name(name)
    assert canonical is not None
    if ".experts.w" in canonical:
        layer, everything = int(canonical.split(".")[1]), slice(0, source.geometry.num_experts)
        found = source.experts(layer, everything)[0 if canonical.endswith("w13") else 1]
    else:
        found = source.tensor(canonical)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected), name


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(scale_dtype="U8", packed_dtype="U8", files=1, mtp=False, seed=1),
        Recipe(scale_dtype="F32", scale_suffix=".weight_scale_inv", prefix="model.", seed=2),
        Recipe(packed_dtype="F4", files=3, seed=3),
        Recipe(quantise=False, seed=4),
    ],
    ids=["deepseek", "bytes", "float-scales", "fp4-type", "plain"],
)
def test_deepseeks_layout_bit_for_bit(tmp_path: Path, recipe: Recipe) -> None:
    written = write(tmp_path, recipe)
    source = checkpoint(tmp_path)
    for name, expected in written.values.items():
        found = source.tensor(name)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), name
    for layer in range(3):
        w13, w2 = source.experts(layer, slice(1, 4))
        for row, expert in enumerate(range(1, 4)):
            part = [written.values[f"layers.{layer}.ffn.experts.{expert}.w{index}.weight"] for index in (1, 3, 2)]
            assert torch.equal(w13[row], torch.cat(part[:2]))
            assert torch.equal(w2[row], part[2])


def test_every_weight_of_a_model_comes_from_the_checkpoint(odd: Written) -> None:
    geometry, weights = load_model(odd.path)
    layer, values = weights.layers[1], odd.values
    assert torch.equal(weights.embed, values["embed.weight"])
    assert torch.equal(layer.attn.wo_a.flatten(0, 1), values["layers.1.attn.wo_a.weight"])
    assert torch.equal(layer.moe.w2[3], values["layers.1.ffn.experts.3.w2.weight"])
    held = sum(tensor.numel() for _, tensor in named_tensors(weights))
    assert held == sum(tensor.numel() for tensor in values.values())
    assert geometry.num_layers == 3


def test_dtypes_of_a_bfloat16_model(odd: Written) -> None:
    source = checkpoint(odd.path, torch.bfloat16)
    always_float32 = ("norm.weight", "_fn", "_base", "_scale", "attn_sink", ".ape", "gate.bias")
    for name, value in odd.values.items():
        found = source.tensor(name)
        if name.endswith("tid2eid"):
            assert found.dtype == torch.int64
        elif name.endswith(always_float32):
            assert torch.equal(found, value)
            assert found.dtype == torch.float32
        else:
            assert found.dtype == torch.bfloat16
            assert torch.equal(found, value.to(torch.bfloat16))
    assert source.experts(0, slice(0, 1))[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.int8])
def test_dtypes_weights_cannot_have(odd: Written, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=str(dtype)):
        checkpoint(odd.path, dtype)


def test_a_rank_reads_its_part_and_holds_no_more(odd: Written) -> None:
    whole = dict(named_tensors(load_model(odd.path)[1]))
    ranks = [dict(named_tensors(load_model(odd.path, shard=Shard(rank, 2))[1])) for rank in range(2)]
    for name, dim in (("layers.1.moe.w13", 0), ("layers.1.attn.wq_b", 0), ("layers.1.attn.wo_b", 1)):
        assert torch.equal(torch.cat([rank[name] for rank in ranks], dim), whole[name])
    for tensor in ranks[1].values():
        assert tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
    with pytest.raises(ConfigError, match="3 tensor parallel ranks do not divide 2"):
        load_model(odd.path, shard=Shard(0, 3))


def test_what_transformers_saves(reference: tuple[Any, Path]) -> None:
    model, path = reference
    assert (path / INDEX).exists()
    source = checkpoint(path)
    for name, expected in model.state_dict().items():
        assert_holds(source, name, expected)


def test_transformers_state_dict(reference: tuple[Any, Path], tmp_path: Path) -> None:
    model, path = reference
    save(tmp_path, json.loads((path / "config.json").read_text()), model.state_dict(), files=1)
    source = checkpoint(tmp_path)
    for name, expected in model.state_dict().items():
        assert_holds(source, name, expected)
    w13, w2 = source.experts(1, slice(2, 5))
    assert torch.equal(w13, model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"][2:5])
    assert torch.equal(w2, model.state_dict()["model.layers.1.mlp.experts.down_proj"][2:5])


def test_deepseeks_spelling_means_the_same_to_transformers(tmp_path: Path) -> None:
    from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM

    config = {key: value for key, value in ODD_CONFIG.items() if key != "quantization_config"}
    write(tmp_path, Recipe(config={**config, **TINY}, quantise=False, mtp=False))
    model = DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    source = checkpoint(tmp_path)
    for name, expected in model.state_dict().items():
        assert_holds(source, name, expected)


Stored = dict[str, Tensor]


def refused(odd: Written, path: Path, change: Callable[[Stored], Any], error: type[Exception], words: str) -> None:
    stored = dict(odd.stored)
    change(stored)
    save(path, ODD_CONFIG, stored, files=1)
    with pytest.raises(error, match=words) as caught:
        checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("norm.weight"), "1 tensor is missing: norm.weight"),
        (lambda s: s.pop("layers.1.ffn.experts.5.w2.weight"), "missing: layers.1.ffn.experts.5.w2.weight"),
        (
            lambda s: [s.pop(name) for name in list(s) if "indexer" in name],
            r"6 tensors are missing: layers\.1\..*, \.\.\.",
        ),
        (lambda s: s.pop("layers.0.attn.wo_a.scale"), "layers.0.attn.wo_a.weight is F8_E4M3 and its scale is missing"),
        (lambda s: s.update({"norm.weight": torch.ones(151)}), r"norm.weight has shape \[151\], expected \[152\]"),
        (
            lambda s: s.update({"layers.2.ffn.experts.0.w1.weight": torch.zeros(44, 77, dtype=torch.int8)}),
            r"experts.0.w1.weight has shape \[44, 154\], expected \[44, 152\]",
        ),
        (
            lambda s: s.update({"layers.2.ffn.experts.0.w1.scale": torch.ones(44, 4)}),
            r"experts.0.w1.scale has shape \[44, 4\], expected \[44, 5\]",
        ),
        (
            lambda s: s.update({"layers.0.attn.wq_a.scale": torch.ones(1, 2)}),
            r"wq_a.scale has shape \[1, 2\], expected \[2, 2\]",
        ),
        (lambda s: s.update({"embed.scale": torch.ones(1, 2)}), "embed.scale belongs to an unquantised BF16"),
        (
            lambda s: s.update({"model.embed_tokens.weight": s["embed.weight"].clone()}),
            "tensor model.embed_tokens.weight is also there as embed.weight",
        ),
    ],
)
def test_inconsistent_checkpoints(odd: Written, tmp_path: Path, change: Callable[[Stored], Any], words: str) -> None:
    refused(odd, tmp_path, change, CheckpointError, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.update({"layers.0.attn.wq_c.weight": torch.ones(1)}), "1 tensor is unknown.*: layers.0.attn.wq_c"),
        (
            lambda s: s.update({f"vision.{number}.weight": torch.ones(1) for number in range(5)}),
            r"5 tensors are unknown to this model: vision.0.weight, vision.1.weight, vision.2.weight, \.\.\.",
        ),
        (lambda s: s.update({"layers.3.attn_norm.weight": torch.ones(152)}), "unknown.*layers.3.attn_norm.weight"),
        (lambda s: s.update({"layers.0.ffn.gate.bias": torch.ones(6)}), "unknown.*layers.0.ffn.gate.bias"),
        (lambda s: s.update({"layers.0.attn.compressor.ape": torch.ones(4, 96)}), "unknown.*layers.0.attn.compressor"),
        (lambda s: s.update({"layers.0.mlp.experts.down_proj": torch.ones(6, 152, 44)}), "unknown.*down_proj"),
        (lambda s: s.update({"norm.weight": torch.ones(152).double()}), "norm.weight has dtype F64"),
        (lambda s: s.update({"norm.weight": torch.ones(152).to(torch.float8_e4m3fn)}), "norm.weight has dtype F8_E4M3"),
        (
            lambda s: s.update({"layers.0.attn.wq_a.weight": torch.zeros(136, 76, dtype=torch.int8)}),
            "wq_a.weight has dtype I8, supported are F32, BF16, F16, F8_E4M3",
        ),
        (
            lambda s: s.update({"layers.0.attn.wq_a.weight": torch.zeros(136, 152).to(torch.float8_e5m2)}),
            "wq_a.weight has dtype F8_E5M2",
        ),
        (lambda s: s.update({"layers.0.attn.wq_a.scale": torch.ones(2, 2).half()}), "wq_a.scale has dtype F16"),
        (lambda s: s.update({"layers.0.ffn.gate.tid2eid": torch.zeros(71, 2)}), "tid2eid has dtype F32"),
    ],
)
def test_unknown_tensors_and_dtypes(odd: Written, tmp_path: Path, change: Callable[[Stored], Any], words: str) -> None:
    refused(odd, tmp_path, change, UnsupportedModelError, words)


def test_values_that_would_fail_later_are_refused_when_read(odd: Written, tmp_path: Path) -> None:
    table = odd.stored["layers.0.ffn.gate.tid2eid"].clone()
    table[7, 1] = 6
    scale = torch.ones(2, 2)
    scale[1, 0] = torch.nan
    stored = {**odd.stored, "layers.0.ffn.gate.tid2eid": table, "layers.0.attn.wq_a.scale": scale}
    save(tmp_path, ODD_CONFIG, stored, files=1)
    source = checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"tid2eid names experts outside 0\.\.5"):
        source.tensor("layers.0.ffn.gate.tid2eid")
    with pytest.raises(CheckpointError, match=r"wq_a\.scale holds values that are not finite"):
        source.tensor("layers.0.attn.wq_a.weight")
    with pytest.raises(CheckpointError, match=r"no tensor layers\.9"):
        source.tensor("layers.9.attn.wq_a.weight")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model_type": "deepseek_v41"}, UnsupportedModelError, "DeepSeek-V4.1"),
        ({"model_type": "deepseek_v3"}, UnsupportedModelError, "'deepseek_v3' is not supported"),
        ({"model_type": None}, UnsupportedModelError, "None is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModelError, "'gptq'"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedModelError, "'awq'"),
    ],
)
def test_other_models_are_refused(
    odd: Written, tmp_path: Path, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    save(tmp_path, {**ODD_CONFIG, **change}, odd.stored, files=1)
    with pytest.raises(error, match=words):
        load_model(tmp_path)


def break_index(content: str) -> Callable[[Path], Any]:
    return lambda path: (path / INDEX).write_text(content)


def pickle_only(path: Path) -> None:
    for file in [path / INDEX, *path.glob("*.safetensors")]:
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps({"embed.weight": 1}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "config.json").unlink(), "no config.json"),
        (lambda path: (path / "config.json").write_text("{"), "not readable as JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "not a JSON object"),
        (lambda path: (path / "model-00002-of-00002.safetensors").unlink(), "1 file is listed.*: model-00002-of-00002"),
        (lambda path: (path / "model-00001-of-00002.safetensors").write_bytes(b"\x80\x04K"), "not a safetensors file"),
        (lambda path: (path / "model-00001-of-00002.safetensors").write_bytes(b"x" * 99), "not a safetensors file"),
        (break_index("{"), "not an index"),
        (break_index("[]"), "not an index"),
        (break_index('{"weight_map": {"a": 3}}'), "not an index"),
        (break_index('{"weight_map": {}}'), "must name files"),
        (break_index('{"weight_map": {"a": "../x.safetensors"}}'), "must name files in the same folder"),
        (break_index('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'), "tensors are missing"),
        (pickle_only, "no .*safetensors files; pytorch_model.bin is pickled and never loaded"),
    ],
)
def test_damaged_folders(tmp_path: Path, odd: Written, damage: Callable[[Path], Any], words: str) -> None:
    save(tmp_path, ODD_CONFIG, odd.stored, files=2)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_refused(tmp_path: Path, odd: Written) -> None:
    save(tmp_path, ODD_CONFIG, odd.stored, files=2)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: truncated"):
        checkpoint(tmp_path)


def test_folders_that_are_none(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(RedKnotError, match=r"no config\.json"):
            load_model(path)
