"""Kernel or reference: chosen from declared features of the machine and the tensors, refused by name with the reason.

Triton is imported here, late, and only for a device that could use it: importing redknot never needs it, and on the CPU
nothing but the references runs unless a kernel is asked for by name (its tests do, in Triton's interpreter). Segment
attention has one more choice, in front of Triton's: FlashMLA, which is no dependency and is used where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from redknot.errors import ConfigError
from redknot.ops import flashmla
from redknot.ops.records import RowFormat


class Op(StrEnum):
    """What has a kernel; the value is the name of the function, in the reference's module and in the kernel's."""

    SEGMENT_ATTENTION = "segment_attention"
    MERGE = "merge_segments"
    PROJECTION = "project_rows_"
    SCORES = "segment_scores"
    EXPERTS = "experts_forward"
    PACK = "pack_"
    UNPACK = "unpack"


_MODULES = {
    Op.SEGMENT_ATTENTION: "segment",
    Op.MERGE: "merge",
    Op.PROJECTION: "projection",
    Op.SCORES: "indexer",
    Op.EXPERTS: "moe",
    Op.PACK: "records",
    Op.UNPACK: "records",
}
DTYPES = (torch.float32, torch.bfloat16)
SMALLEST_WIDTH = 16  # what tl.dot asks of a side
MOST_CHANNELS = {Op.SEGMENT_ATTENTION: 512, Op.MERGE: 512, Op.SCORES: 128, Op.PACK: 1024, Op.UNPACK: 1024}
MOST_HEADS = {Op.SCORES: 64}  # of one tile; attention takes any number, a tile at a time
# Compute capabilities: bf16 products since Ampere; the conversion from e4m3, which unpacking uses, since Ada.
PRODUCTS, FROM_E4M3 = (8, 0), (8, 9)


class Mode(StrEnum):
    """What the caller wants."""

    AUTO = "auto"  # the kernel on a GPU that fits, else the reference
    KERNEL = "kernel"  # the kernel, or ConfigError
    REFERENCE = "reference"


@dataclass(frozen=True)
class Machine:
    """What a device and this process offer."""

    device: str  # a torch device type
    capability: tuple[int, int] | None  # of a CUDA device
    has_triton: bool
    interpreted: bool  # whether Triton runs kernels in its interpreter


@dataclass(frozen=True)
class Features:
    """What a call will bring: widths are channels, ``records`` is None for plain latents and keys."""

    dtype: torch.dtype  # of queries or inputs
    channels: int  # of a latent, an indexer key or, for projection and experts, the depth of the product
    rope_dim: int = 0
    heads: int = 1
    records: RowFormat | None = None


@dataclass(frozen=True)
class Choice:
    """What to call, whether it is a kernel, and why it is not (empty where it is, or where nobody wanted one).

    ``passed_over`` says why FlashMLA is not what was chosen, where it was looked at.
    """

    function: Callable[..., Any]
    is_kernel: bool
    reason: str
    passed_over: str = ""


def machine_of(device: torch.device) -> Machine:
    """What ``device`` offers; imports triton where there is one."""
    has_triton = find_spec("triton") is not None
    interpreted = has_triton and bool(import_module("triton").knobs.runtime.interpret)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return Machine(device.type, capability, has_triton, interpreted)


def choose(op: Op, features: Features, device: torch.device, mode: Mode = Mode.AUTO) -> Choice:
    """The function for an operation on a device; ConfigError where a kernel is demanded and cannot be had."""
    reason = passed_over = ""
    if mode is not Mode.REFERENCE and (mode is Mode.KERNEL or device.type != "cpu"):
        machine = machine_of(device)
        if op is Op.SEGMENT_ATTENTION:
            passed_over = flashmla_refusal(features, machine)
            if not passed_over:
                return Choice(flashmla.segment_attention, True, "")
        reason = refusal(op, features, machine)
        if not reason:
            return Choice(_function(f"{_MODULES[op]}_triton", op), True, "", passed_over)
        if mode is Mode.KERNEL:
            raise ConfigError(f"kernel {op}: {reason}; the reference has no such limit (mode reference)")
    return Choice(_function(_MODULES[op], op), False, reason, passed_over)


def _function(module: str, op: Op) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"redknot.ops.{module}"), op.value)
    return function


def refusal(op: Op, features: Features, machine: Machine) -> str:
    """Why a kernel cannot serve a call, in words; empty where it can."""
    return _machine_refusal(features, machine) or _shape_refusal(op, features)


def flashmla_refusal(features: Features, machine: Machine) -> str:
    """Why FlashMLA cannot serve segment attention; empty where it can. Its module is looked at last."""
    packed = features.records is not None
    return (
        flashmla.device_refusal(machine.device, machine.capability)
        or flashmla.shape_refusal(features.dtype, features.channels, features.heads, packed=packed)
        or flashmla.module_refusal()
    )


def _machine_refusal(features: Features, machine: Machine) -> str:
    if not machine.has_triton:
        return "triton is not installed (the dev extra has it)"
    if machine.interpreted:
        return ""
    if machine.device != "cuda" or machine.capability is None:
        return f"device {machine.device} has no kernels without Triton's interpreter (TRITON_INTERPRET=1)"
    needed = PRODUCTS if features.records is None else FROM_E4M3
    if machine.capability < needed:
        found, asked = (".".join(map(str, pair)) for pair in (machine.capability, needed))
        return f"compute capability {found} is below {asked}" + (" for packed rows" if features.records else "")
    return ""


def _shape_refusal(op: Op, features: Features) -> str:
    if features.dtype not in DTYPES:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return f"dtype {str(features.dtype).removeprefix('torch.')} is not {names}"
    most = MOST_CHANNELS.get(op)
    if most is not None and features.channels > most:
        return f"{features.channels} channels are more than {most}"
    if op in (Op.SEGMENT_ATTENTION, Op.SCORES):
        if features.channels < SMALLEST_WIDTH or features.channels % 2:
            return f"{features.channels} channels are odd or fewer than {SMALLEST_WIDTH}"
        if features.rope_dim % 2 or not 0 <= features.rope_dim <= features.channels:
            return f"{features.rope_dim} RoPE channels are not pairs of {features.channels}"
        most = MOST_HEADS.get(op, features.heads)
        if not 1 <= features.heads <= most:
            return f"{features.heads} heads are not 1 to {most}"
    if features.records is not None and features.records.width != features.channels:
        return f"packed rows have {features.records.width} channels, the call {features.channels}"
    return ""
