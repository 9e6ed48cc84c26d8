"""Kernel or reference: what each feature decides, that a refusal names it, and that the CPU stays as it is."""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from redknot.errors import ConfigError
from redknot.ops import dispatch
from redknot.ops.dispatch import Features, Machine, Mode, Op, choose, refusal
from redknot.ops.records import V4_INDEX_FP4, V4_RECORD
from tests.kit import child

H200 = Machine("cuda", (9, 0), has_triton=True, interpreted=False)
FLASH = Features(torch.bfloat16, channels=512, rope_dim=64, heads=64, records=V4_RECORD)
INDEXER = Features(torch.bfloat16, channels=128, rope_dim=64, heads=64, records=V4_INDEX_FP4)
CPU = torch.device("cpu")


def features_of(op: Op) -> Features:
    if op in (Op.PROJECTION, Op.EXPERTS):
        return Features(torch.bfloat16, channels=4096)
    return INDEXER if op is Op.SCORES else replace(FLASH, records=None) if op is Op.MERGE else FLASH


@pytest.mark.parametrize("op", list(Op))
def test_an_h200_at_the_geometry_of_flash_has_every_kernel(op: Op) -> None:
    assert refusal(op, features_of(op), H200) == ""


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        (replace(H200, has_triton=False), "triton is not installed"),
        (Machine("cpu", None, has_triton=True, interpreted=False), "device cpu has no kernels"),
        (Machine("mps", None, has_triton=True, interpreted=False), "device mps has no kernels"),
        (replace(H200, capability=(8, 6)), "compute capability 8.6 is below 8.9 for packed rows"),
        (replace(H200, capability=(7, 5)), "compute capability 7.5 is below 8.9"),
    ],
)
def test_a_machine_that_cannot_is_named(machine: Machine, text: str) -> None:
    assert text in refusal(Op.SEGMENT_ATTENTION, FLASH, machine)


def test_plain_latents_need_less() -> None:
    ampere = replace(H200, capability=(8, 0))
    assert refusal(Op.SEGMENT_ATTENTION, replace(FLASH, records=None), ampere) == ""
    assert "8.0 is below 8.9" in refusal(Op.SEGMENT_ATTENTION, FLASH, ampere)
    assert "7.5 is below 8.0" in refusal(Op.PROJECTION, features_of(Op.PROJECTION), replace(H200, capability=(7, 5)))


@pytest.mark.parametrize(
    ("op", "features", "text"),
    [
        (Op.SEGMENT_ATTENTION, replace(FLASH, dtype=torch.float16), "dtype float16 is not float32 or bfloat16"),
        (Op.EXPERTS, Features(torch.float64, 4096), "dtype float64"),
        (Op.SEGMENT_ATTENTION, replace(FLASH, channels=576), "576 channels are more than 512"),
        (Op.SEGMENT_ATTENTION, Features(torch.float32, 8), "8 channels are odd or fewer than 16"),
        (Op.SEGMENT_ATTENTION, Features(torch.float32, 33), "33 channels are odd"),
        (Op.SEGMENT_ATTENTION, replace(FLASH, rope_dim=514), "514 RoPE channels"),
        (Op.SEGMENT_ATTENTION, replace(FLASH, rope_dim=63), "63 RoPE channels"),
        (Op.SCORES, replace(INDEXER, heads=65), "65 heads are not 1 to 64"),
        (Op.SCORES, replace(INDEXER, heads=0), "0 heads are not 1 to 64"),
        (Op.SEGMENT_ATTENTION, replace(FLASH, channels=256), "packed rows have 512 channels, the call 256"),
    ],
)
def test_what_a_kernel_cannot_is_named(op: Op, features: Features, text: str) -> None:
    assert text in refusal(op, features, H200)


@pytest.mark.parametrize("op", list(Op))
def test_the_cpu_runs_references(op: Op) -> None:
    """Even in a process whose Triton is the interpreter, as the one of these tests."""
    for mode in (Mode.AUTO, Mode.REFERENCE):
        chosen = choose(op, features_of(op), CPU, mode)
        assert not chosen.is_kernel
        assert chosen.reason == ""
        assert not chosen.function.__module__.endswith("_triton")


def test_a_kernel_that_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "machine_of", lambda _: replace(H200, has_triton=False))
    with pytest.raises(ConfigError, match=r"kernel segment_attention: triton is not installed .* \(mode reference\)"):
        choose(Op.SEGMENT_ATTENTION, FLASH, CPU, Mode.KERNEL)
    # On a GPU that lacks it, the reference runs, and says why.
    chosen = choose(Op.SEGMENT_ATTENTION, FLASH, torch.device("cuda"))
    assert not chosen.is_kernel
    assert "triton is not installed" in chosen.reason


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("op", list(Op))
def test_kernels_have_the_signature_of_their_references(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "machine_of", lambda _: H200)
    kernel, reference = (choose(op, features_of(op), CPU, mode) for mode in (Mode.KERNEL, Mode.REFERENCE))
    assert kernel.is_kernel
    assert kernel.function.__module__ == f"{reference.function.__module__}_triton"
    assert inspect.signature(kernel.function) == inspect.signature(reference.function)


def test_nothing_imports_triton_until_a_kernel_is_chosen() -> None:
    source = """
import sys, torch
import redknot, redknot.runtime.engine
from redknot.ops.dispatch import Features, Op, choose
choose(Op.MERGE, Features(torch.float32, 512), torch.device("cpu"))
print("triton" in sys.modules)
"""
    done = child.python(source)
    assert done.out.splitlines() == ["False"], done.err
