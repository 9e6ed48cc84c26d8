"""What the tests of Triton kernels share: where they run, hostile memory, and pages of packed rows.

A test imports this before a kernel. Without triton, or where it would compile for a GPU that is not there, its module
is skipped. Kernels run before their references: what a reference left in memory must not be what a kernel is judged by.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from redknot.ops.records import Records, RowFormat, split_pages
from redknot.ops.rope import Rotation, rotation_at

triton = pytest.importorskip("triton", reason="triton is in the dev extra on Linux")
INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cpu" if INTERPRETED else "cuda"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("triton kernels need TRITON_INTERPRET=1 or a GPU", allow_module_level=True)

NAN = float("nan")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def integers(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def strided(x: Tensor) -> Tensor:
    """The same values at odd strides, with NaN (or the lowest number) between them."""
    wide = torch.full([2 * n + 1 for n in x.shape], NAN if x.is_floating_point() else torch.iinfo(x.dtype).min)
    wide = wide.to(x.device, x.dtype)
    view = wide[tuple(slice(1, None, 2) for _ in x.shape)]
    view.copy_(x)
    return view


def rotation(rows: int, half: int, seed: int = 0) -> Rotation:
    frequencies = 10000.0 ** -(torch.arange(half) / half)
    positions = torch.randint(-5000, 5000, (rows,), generator=torch.Generator().manual_seed(seed))
    turned = rotation_at(positions, frequencies)
    return Rotation(turned.cos.to(DEVICE), turned.sin.to(DEVICE))


def poisoned_pages(row_format: RowFormat, rows: int, pages: int) -> Records:
    """Pages between which and in which every byte is 0xFF: NaN in each element and scale."""
    nbytes = rows * (row_format.data_bytes + 8 + row_format.scale_bytes) + 24
    memory = torch.full((2 * pages + 1, nbytes - nbytes % 4), 0xFF, dtype=torch.uint8, device=DEVICE)
    return split_pages(memory[1::2], row_format, rows)


def worst(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest magnitude; equal infinities are no difference."""
    assert found.shape == expected.shape
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.equal(found[found.isinf()], expected[found.isinf()])
    if not found.numel():
        return 0.0
    difference = torch.where(expected.isinf(), 0.0, found - expected.float()).abs()
    return (
        float(difference.max() / expected[~expected.isinf()].abs().max().clamp_min(1e-30)) if difference.any() else 0.0
    )
