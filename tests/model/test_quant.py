"""Dequantisation against definitions written out code by code, and against transformers'."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from redknot.errors import CheckpointError, UnsupportedModelError
from redknot.model.quant import (
    block_of_config,
    check_scale,
    dequantise_fp8,
    dequantise_mxfp4,
    logical_shape,
    scale_values,
)
from redknot.model.tensorfile import StoredTensor
from tests.kit.quantised import e2m1_value, e4m3_value


def stored(dtype: str, *shape: int, name: str = "x.weight") -> StoredTensor:
    return StoredTensor(Path("f"), name, dtype, shape, 0, 0)


def test_every_fp8_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    values = dequantise_fp8(codes.view(torch.float8_e4m3fn), torch.full((1, 1), 0.25))
    expected = torch.tensor([0.25 * e4m3_value(code) for code in range(256)]).view(16, 16)
    assert torch.equal(values.isnan(), expected.isnan())
    assert torch.equal(values.nan_to_num(), expected.nan_to_num())


def test_every_fp4_pair_low_nibble_first() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    values = dequantise_mxfp4(packed, torch.ones(16, 1)).view(256, 2)
    expected = torch.tensor([[e2m1_value(byte % 16), e2m1_value(byte // 16)] for byte in range(256)])
    assert torch.equal(values, expected)
    assert sorted({abs(float(value)) for value in values.flatten()}) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_ue8m0_is_a_power_of_two_in_either_container() -> None:
    codes = torch.arange(255, dtype=torch.uint8)
    expected = torch.tensor([2.0 ** (code - 127) for code in range(255)])
    assert torch.equal(scale_values(codes), expected)
    assert torch.equal(scale_values(codes.view(torch.float8_e8m0fnu)), expected)
    assert math.isnan(float(scale_values(torch.tensor([255], dtype=torch.uint8))))


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (127, 128), (128, 130), (129, 66), (300, 258)])
def test_scales_reach_exactly_their_block(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    ones = torch.ones(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(math.ceil(rows / 128), math.ceil(columns / 128), generator=generator)
    fp8 = dequantise_fp8(ones, scales)
    groups = torch.rand(rows, math.ceil(columns / 32), generator=generator)
    fp4 = dequantise_mxfp4(torch.full((rows, columns // 2), 0x22, dtype=torch.uint8), groups)
    for row in range(0, rows, 7):
        for column in range(columns):
            assert fp8[row, column] == scales[row // 128, column // 128]
            assert fp4[row, column] == groups[row, column // 32]


def test_another_block_size() -> None:
    scales = torch.arange(6.0).view(2, 3)
    values = dequantise_fp8(torch.ones(3, 5).to(torch.float8_e4m3fn), scales, (2, 2))
    assert values.tolist() == [[0, 0, 1, 1, 2], [0, 0, 1, 1, 2], [3, 3, 4, 4, 5]]


def test_equal_to_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(0)
    oracle: Any = Fp8Dequantize(None)
    weight = torch.randn(256, 384, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.randint(120, 130, (2, 3), generator=generator, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    expected = oracle._dequantize_one(weight, scale, output_dtype=torch.float32)
    assert torch.equal(dequantise_fp8(weight, scale_values(scale)), expected)
    packed = torch.randint(-128, 128, (64, 48), generator=generator, dtype=torch.int8)
    groups = torch.randint(120, 130, (64, 3), generator=generator, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    expected = oracle._dequantize_one(packed, groups, output_dtype=torch.float32)
    assert torch.equal(dequantise_mxfp4(packed.view(torch.uint8), scale_values(groups)), expected)


def test_logical_shape_counts_values() -> None:
    assert logical_shape(stored("I8", 4, 16)) == logical_shape(stored("U8", 4, 16)) == (4, 32)
    assert logical_shape(stored("F4", 4, 32)) == logical_shape(stored("F8_E4M3", 4, 32)) == (4, 32)


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        (stored("F8_E4M3", 129, 128), stored("F32", 2, 1)),
        (stored("F8_E4M3", 128, 130), stored("U8", 1, 2)),
        (stored("I8", 3, 24), stored("F8_E8M0", 3, 2)),
        (stored("F4", 3, 48), stored("F8_E8M0", 3, 2)),
        (stored("BF16", 3, 48), None),
    ],
)
def test_scales_that_fit(weight: StoredTensor, scale: StoredTensor | None) -> None:
    check_scale(weight, scale, (128, 128))


@pytest.mark.parametrize(
    ("weight", "scale", "error", "words"),
    [
        (stored("F8_E4M3", 129, 128), stored("F32", 1, 1, name="x.scale"), CheckpointError, r"x\.scale .*\[2, 1\]"),
        (stored("F8_E4M3", 128, 128), stored("F32", 1, name="x.scale"), CheckpointError, r"\[1\], expected \[1, 1\]"),
        (stored("F8_E4M3", 128, 128), None, CheckpointError, "x.weight is F8_E4M3 and its scale is missing"),
        (stored("I8", 3, 24), stored("U8", 3, 1, name="x.scale"), CheckpointError, r"\[3, 1\], expected \[3, 2\]"),
        (stored("I8", 3, 24), stored("U8", 1, 1, name="x.scale"), CheckpointError, r"\[1, 1\], expected \[3, 2\]"),
        (stored("F8_E4M3", 1, 1), stored("F16", 1, 1, name="x.scale"), UnsupportedModelError, "x.scale has dtype F16"),
        (stored("F8_E4M3", 1, 1), stored("I8", 1, 1, name="x.scale"), UnsupportedModelError, "x.scale has dtype I8"),
        (stored("BF16", 3, 48), stored("U8", 3, 2, name="x.scale"), CheckpointError, "x.scale belongs to an unquant"),
    ],
)
def test_scales_that_do_not_fit(
    weight: StoredTensor, scale: StoredTensor | None, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        check_scale(weight, scale, (128, 128))


def test_block_of_config() -> None:
    assert block_of_config({}) == block_of_config({"quantization_config": None}) == (128, 128)
    assert block_of_config({"quantization_config": {"quant_method": "fp8"}}) == (128, 128)
    assert block_of_config({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 32]}}) == (64, 32)


@pytest.mark.parametrize(
    ("quantised", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"bits": 4}, "quant_method None"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "scale_fmt": "e4m3"}, "scale_fmt 'e4m3'"),
        ({"quant_method": "fp8", "expert_dtype": "nvfp4"}, "expert_dtype 'nvfp4'"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_block_size None"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"weight_block_size \[0, 128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\]"),
    ],
)
def test_other_quantisations_are_refused_by_name(quantised: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        block_of_config({"quantization_config": quantised})


def test_compressed_tensors_config_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="compressed-tensors"):
        block_of_config({"compression_config": {"quant_method": "compressed-tensors"}})
    with pytest.raises(CheckpointError, match="not an object"):
        block_of_config({"quantization_config": "fp8"})
