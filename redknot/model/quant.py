"""Quantised weights back to float32: fp8 with block scales, and MXFP4 routed experts.

On disk, as DeepSeek-V4 ships them and ``transformers`` reads them: a matrix ``X.weight`` [rows, columns] in fp8
(e4m3) has one scale per block, ``X.scale`` or ``X.weight_scale_inv`` [ceil(rows / 128), ceil(columns / 128)]; a routed
expert in MXFP4 is [rows, columns / 2] bytes, each with two e2m1 values of which the even column is the low nibble, and
``X.scale`` [rows, ceil(columns / 32)]. Scales are float32, or ue8m0: a byte b that means 2 ** (b - 127), stored as its
own type or as plain bytes. The value is always weight times scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from redknot.errors import CheckpointError, UnsupportedModelError
from redknot.model.tensorfile import StoredTensor

PLAIN = ("F32", "BF16", "F16")
FP8 = "F8_E4M3"
PACKED = ("I8", "U8", "F4")
SCALES = ("F8_E8M0", "U8", "F32")
MXFP4_GROUP = 32

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_PAIRS = torch.tensor([(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)])  # [256, 2]


def block_of_config(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of an fp8 block; raises UnsupportedModelError for any other quantisation than DeepSeek's."""
    quantised = config.get("quantization_config") or config.get("compression_config")
    if quantised is None:
        return 128, 128
    if not isinstance(quantised, Mapping):
        raise CheckpointError("config.json: quantization_config is not an object")
    for key, default, supported in (
        ("quant_method", None, ("fp8",)),
        ("fmt", "e4m3", ("e4m3",)),
        ("scale_fmt", "float", ("float", "ue8m0")),
        ("expert_dtype", "fp8", ("fp8", "fp4")),
    ):
        value = quantised.get(key, default)
        if value not in supported:
            raise UnsupportedModelError(
                f"config.json: quantization_config {key} {value!r} is not supported, only {' or '.join(supported)}"
            )
    block = quantised.get("weight_block_size", (128, 128))
    if not isinstance(block, list | tuple) or len(block) != 2 or any(type(n) is not int or n < 1 for n in block):
        raise UnsupportedModelError(f"config.json: weight_block_size {block!r} is not two positive whole numbers")
    return block[0], block[1]


def logical_shape(stored: StoredTensor) -> tuple[int, ...]:
    """The shape of the weight that a stored tensor holds: twice the columns when bytes hold two values each."""
    if stored.dtype in ("I8", "U8") and stored.shape:
        return (*stored.shape[:-1], 2 * stored.shape[-1])
    return stored.shape


def expected_scale(stored: StoredTensor, block: tuple[int, int]) -> tuple[int, ...] | None:
    """The shape of the scale that a stored matrix needs, None when its values are plain."""
    if stored.dtype in PLAIN:
        return None
    rows, columns = logical_shape(stored)
    if stored.dtype == FP8:
        return -(-rows // block[0]), -(-columns // block[1])
    return rows, -(-columns // MXFP4_GROUP)


def check_scale(stored: StoredTensor, scale: StoredTensor | None, block: tuple[int, int]) -> None:
    """Raise CheckpointError or UnsupportedModelError unless a stored matrix has exactly the scale it needs."""
    expected = expected_scale(stored, block)
    if expected is None:
        if scale is not None:
            raise CheckpointError(f"{scale.file}: scale {scale.name} belongs to an unquantised {stored.dtype} weight")
        return
    if scale is None:
        raise CheckpointError(f"{stored.file}: tensor {stored.name} is {stored.dtype} and its scale is missing")
    if scale.dtype not in SCALES:
        raise UnsupportedModelError(
            f"{scale.file}: scale {scale.name} has dtype {scale.dtype}, supported are {', '.join(SCALES)}"
        )
    if scale.shape != expected:
        raise CheckpointError(
            f"{scale.file}: scale {scale.name} has shape {list(scale.shape)}, expected {list(expected)} for "
            f"{stored.dtype} {list(stored.shape)}"
        )


def read_weight(stored: StoredTensor, scale: StoredTensor | None, block: tuple[int, int]) -> Tensor:
    """A stored tensor as its values, float32 where it was quantised."""
    if scale is None:
        return stored.read()
    scales = scale_values(scale.read())
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError(f"{scale.file}: scale {scale.name} holds values that are not finite")
    if stored.dtype == FP8:
        return dequantise_fp8(stored.read(), scales, block)
    return dequantise_mxfp4(stored.read().view(torch.uint8), scales)


def scale_values(scale: Tensor) -> Tensor:
    """Scales as float32; bytes are ue8m0 exponents."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def dequantise_fp8(weight: Tensor, scales: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """An e4m3 matrix [rows, columns] times its block scales [ceil(rows / b0), ceil(columns / b1)], float32."""
    rows, columns = weight.shape
    grid = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight.float().mul_(grid)


def dequantise_mxfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """Bytes [rows, columns / 2] of two e2m1 values each, times scales [rows, ceil(columns / 32)], float32."""
    rows, half = packed.shape
    values = _PAIRS.index_select(0, packed.flatten().int()).view(rows, 2 * half)
    return values.mul_(scales.repeat_interleave(MXFP4_GROUP, 1)[:, : 2 * half])
