"""Checkpoints that must not load: each is refused before it is read, in one line that names what was found."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from redknot.errors import CheckpointError, RedKnotError, UnsupportedModelError
from redknot.model.checkpoint import INDEX, Checkpoint, load_model
from redknot.model.geometry import load_geometry
from tests.kit.quantised import ODD_CONFIG, Recipe, Written, save, write

Stored = dict[str, Tensor]


def refused(odd: Written, path: Path, change: Callable[[Stored], Any], error: type[Exception], words: str) -> None:
    stored = dict(odd.stored)
    change(stored)
    save(path, ODD_CONFIG, stored, files=1)
    with pytest.raises(error, match=words) as caught:
        Checkpoint(path, load_geometry(path))
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
    source = Checkpoint(tmp_path, load_geometry(tmp_path))
    with pytest.raises(CheckpointError, match=r"tid2eid names experts outside 0\.\.5"):
        source.tensor("layers.0.ffn.gate.tid2eid")
    with pytest.raises(CheckpointError, match=r"wq_a\.scale holds values that are not finite"):
        source.tensor("layers.0.attn.wq_a.weight")
    with pytest.raises(CheckpointError, match=r"no tensor layers\.9"):
        source.tensor("layers.9.attn.wq_a.weight")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["norm.weight", "layers.1.attn.attn_sink", "layers.2.ffn.experts.5.w2.weight"])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, name: str, value: float) -> None:
    """One value anywhere, in whatever dtype."""
    plain = write(tmp_path / "plain", Recipe(quantise=False))
    stored = {**plain.stored, name: plain.stored[name].clone()}
    stored[name].view(-1)[-1] = value
    save(tmp_path / "broken", ODD_CONFIG, stored, files=1)
    with pytest.raises(CheckpointError, match=rf"model.*safetensors: tensor {name} holds values that are not finite$"):
        load_model(tmp_path / "broken")


def test_the_nan_of_fp8_is_refused_by_name(odd: Written, tmp_path: Path) -> None:
    weight = odd.stored["layers.0.attn.wq_a.weight"].clone()
    weight.view(torch.uint8)[3, 4] = 0x7F
    save(tmp_path, ODD_CONFIG, {**odd.stored, "layers.0.attn.wq_a.weight": weight}, files=1)
    with pytest.raises(CheckpointError, match=r"tensor layers\.0\.attn\.wq_a\.weight holds values that are not finite"):
        load_model(tmp_path)


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
        Checkpoint(tmp_path, load_geometry(tmp_path))


def test_folders_that_are_none(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(RedKnotError, match=r"no config\.json"):
            load_model(path)
