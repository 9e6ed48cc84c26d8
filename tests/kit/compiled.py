"""Compiles every kernel for an H200 without one, at the geometry of Flash, and prints what each takes.

Run as a program, since Triton is either a compiler or an interpreter in a process. The launches are those of the
wrappers, with tensors of the CPU, under a driver that names the target and loads nothing; no kernel runs.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from redknot.model.weights import MoeWeights
from redknot.ops import indexer_triton, merge_triton, moe_triton, projection_triton, records_triton, segment_triton
from redknot.ops.moe import Routing
from redknot.ops.records import V4_INDEX_FP4, V4_INDEX_FP8, V4_RECORD, Records, RowFormat, split_pages
from redknot.ops.rope import Rotation

BF16 = torch.bfloat16
LAUNCH = jit.JITFunction.run


class Target:
    """The least of a driver: what to compile for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int | None = None) -> int:
        return 0


def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    made = LAUNCH(self, *arguments, grid=grid, warmup=True, **options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        Path(cubin.name).write_bytes(made.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    stack, registers = (int(re.findall(rf"{word}:(\d+)", usage)[-1]) for word in ("STACK", "REG"))
    ptx = made.asm["ptx"]
    tensor_cores = ptx.count("wgmma.mma_async") + ptx.count("mma.sync")
    found = {"kernel": self.__name__, "shared": made.metadata.shared, "stack": stack, "registers": registers}
    print(json.dumps(found | {"warps": made.metadata.num_warps, "tensor_core_products": tensor_cores}), flush=True)


def pages(row_format: RowFormat) -> Records:
    return split_pages(torch.zeros(2, 64 * (row_format.data_bytes + 8), dtype=torch.uint8), row_format, 64)


def stretched(*shape: int) -> Tensor:
    """The shape and strides of bf16 weights, without their memory."""
    return torch.zeros(1, dtype=BF16).as_strided((1,) * len(shape), (1,) * len(shape)).expand(shape)


def rotation(rows: int) -> Rotation:
    return Rotation(torch.ones(rows, 32), torch.zeros(rows, 32))


def launches() -> Iterator[None]:
    """Every kernel, in each form that is another program."""
    for row_format in (V4_RECORD, V4_INDEX_FP8, V4_INDEX_FP4):
        numbers = torch.arange(8)
        yield records_triton.pack_(pages(row_format), numbers, torch.zeros(8, row_format.width, dtype=BF16))
        records_triton.unpack(pages(row_format), numbers)
    merge_triton.merge_segments(torch.zeros(3, 4, 64, 512), torch.zeros(3, 4, 64), torch.zeros(64))
    chosen = torch.zeros(4, 640, dtype=torch.int64)
    for heads, dtype in ((64, BF16), (32, BF16), (16, BF16), (64, torch.float32)):
        for keys in (pages(V4_RECORD), torch.zeros(64, 512, dtype=BF16)):
            q = torch.zeros(4, heads, 512, dtype=dtype)
            segment_triton.segment_attention(q, rotation(4), keys, chosen)
    for rows in (4, 512):
        z, output = torch.zeros(rows, 8, 1024), torch.zeros(rows, 8, 8, 512, dtype=BF16)
        wo_a, restored = stretched(8, 4096, 1024), torch.zeros(rows, 8192)
        projection_triton.project_rows_(z, output, wo_a, torch.arange(rows), restored)
    for row_format in (V4_INDEX_FP8, V4_INDEX_FP4):
        q, weights, visible = torch.zeros(16, 64, 128, dtype=BF16), torch.zeros(16, 64), torch.zeros(16).long()
        indexer_triton.segment_scores(q, rotation(16), pages(row_format), torch.arange(64), weights, visible)
    none, w13, w2 = torch.empty(0), stretched(16, 4096, 4096), stretched(16, 4096, 2048)
    experts = MoeWeights(none, None, None, w13, w2, 0, none, none)
    for rows in (4, 600):
        x, routed = torch.zeros(rows, 4096, dtype=BF16), torch.zeros(rows, 6, dtype=torch.int64)
        laid_out = moe_triton.dispatch(Routing(routed, torch.zeros(rows, 6), None), 0, 16)
        moe_triton.add_experts_(torch.zeros_like(x), experts, x, laid_out, 10.0)


if __name__ == "__main__":
    driver.set_active(Target())
    jit.JITFunction.run = compile_only
    for _ in launches():
        pass
