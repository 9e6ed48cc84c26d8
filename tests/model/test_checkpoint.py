"""Loading checkpoints: DeepSeek's quantised layout bit for bit, and transformers' two spellings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from redknot.comm.shard import Shard
from redknot.errors import CheckpointError, ConfigError
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


def test_fused_experts_that_are_not_finite(reference: tuple[Any, Path], tmp_path: Path) -> None:
    """Of the experts that are read alone: what a rank does not read it cannot judge."""
    model, path = reference
    name = "model.layers.1.mlp.experts.down_proj"
    state = model.state_dict() | {name: model.state_dict()[name].clone()}
    state[name][-1, 0, 0] = torch.nan
    save(tmp_path, json.loads((path / "config.json").read_text()), state, files=1)
    source = checkpoint(tmp_path)
    source.experts(1, slice(0, len(state[name]) - 1))
    with pytest.raises(CheckpointError, match=rf"tensor {name} holds values that are not finite"):
        source.experts(1, slice(0, len(state[name])))


def test_deepseeks_spelling_means_the_same_to_transformers(tmp_path: Path) -> None:
    from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM

    config = {key: value for key, value in ODD_CONFIG.items() if key != "quantization_config"}
    write(tmp_path, Recipe(config={**config, **TINY}, quantise=False, mtp=False))
    model = DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    source = checkpoint(tmp_path)
    for name, expected in model.state_dict().items():
        assert_holds(source, name, expected)
