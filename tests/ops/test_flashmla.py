"""FlashMLA's sparse prefill behind segment attention: against the reference, with a stand-in of what it publishes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from redknot.errors import ConfigError
from redknot.ops import dispatch, flashmla
from redknot.ops.attention import Partial, apply_sink_, merge_
from redknot.ops.dispatch import Features, Machine, Mode, Op, choose, flashmla_refusal
from redknot.ops.records import V4_RECORD
from redknot.ops.rope import Rotation, rotation_at
from redknot.ops.segment import segment_attention as reference

INF = float("inf")
ROUNDED = 2e-2  # bf16 queries once turned, bf16 outputs
HOPPER = Machine("cuda", (9, 0), has_triton=True, interpreted=False)
FLASH = Features(torch.bfloat16, channels=512, rope_dim=64, heads=64)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "kit/standins"))
    monkeypatch.delitem(sys.modules, "flash_mla", raising=False)
    yield
    sys.modules.pop("flash_mla", None)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotation(rows: int) -> Rotation:
    return rotation_at(torch.arange(rows) * 7 - 3, 10000.0 ** -(torch.arange(32) / 32))


def case(rows: int, count: int, held: int, heads: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, latents that are NaN where nobody looks, and indices with -1, repeats and numbers outside."""
    indices = torch.randint(-1, held, (rows, count), generator=torch.Generator().manual_seed(rows + count))
    indices[0, ::3], indices[-1, ::4] = 2**40, -(2**40)
    indices[:, -1] = held
    keys = torch.full((held, 512), float("nan"), dtype=torch.bfloat16)
    used = indices[(indices >= 0) & (indices < held)].unique()
    keys[used] = random(held, 512, seed=1)[used].bfloat16()
    return (random(rows, heads, 512) * 3 * 512**-0.5).bfloat16(), keys, indices


def close(found: Partial, expected: Partial) -> None:
    assert found.output.dtype == found.lse.dtype == torch.float32
    assert torch.equal(found.lse.isinf(), expected.lse.isinf())
    assert torch.allclose(found.lse, expected.lse, rtol=0, atol=ROUNDED)  # equal infinities are close
    assert float((found.output - expected.output).abs().max()) <= ROUNDED * float(expected.output.abs().max())


@pytest.mark.parametrize(("rows", "count", "heads"), [(1, 2, 64), (3, 40, 128), (2, 130, 64), (2, 128, 8)])
@pytest.mark.parametrize("turns", [False, True])
def test_it_is_the_reference(installed: None, rows: int, count: int, heads: int, turns: bool) -> None:
    q, keys, indices = case(rows, count, 50, heads)
    turned = rotation(rows) if turns else None
    close(flashmla.segment_attention(q, turned, keys, indices), reference(q, turned, keys, indices))


def test_rows_that_see_nothing(installed: None) -> None:
    """The kernel says +inf; here an empty part is -inf, so that it merges."""
    q, keys, indices = case(3, 20, 50)
    indices[1] = -1
    found = flashmla.segment_attention(q, rotation(3), keys, indices)
    assert not found.output[1].any()
    assert bool((found.lse[1] == -INF).all())
    assert found.lse[[0, 2]].isfinite().all()
    for nothing in (
        flashmla.segment_attention(q, None, keys[:0], indices),
        flashmla.segment_attention(q, None, keys, indices[:, :0]),
    ):
        assert not nothing.output.any()
        assert bool((nothing.lse == -INF).all())
    assert flashmla.segment_attention(q[:0], None, keys, indices[:0]).output.shape == (0, 64, 512)


def test_what_lies_behind_the_last_entry_is_cut_off(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import flash_mla

    lengths, native = [], flash_mla.flash_mla_sparse_fwd

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
        lengths.append(topk_length.tolist())
        assert attn_sink is None  # it enters at the merge
        return native(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)

    monkeypatch.setattr(flash_mla, "flash_mla_sparse_fwd", flash_mla_sparse_fwd)
    q, keys, indices = case(3, 20, 50)
    indices[0, 5:], indices[1] = -1, -1
    indices[0, 4] = indices[2, 18] = int(indices[(indices >= 0) & (indices < 50)][0])
    flashmla.segment_attention(q, None, keys, indices)
    assert lengths == [[5, 1, 19]]


def test_the_sink_enters_once_at_the_merge(installed: None) -> None:
    """Two parts merged and the sink applied are what the kernel gives over all keys with the sink in it."""
    import flash_mla

    q, keys, sinks = random(4, 64, 512).mul(512**-0.5).bfloat16(), random(40, 512, seed=1).bfloat16(), random(64)
    indices = torch.arange(40).expand(4, 40)
    whole = flashmla.segment_attention(q, None, keys, indices[:, :25])
    merge_(whole, flashmla.segment_attention(q, None, keys, indices[:, 25:]))
    padded = torch.nn.functional.pad(indices, (0, 88), value=-1).to(torch.int32).unsqueeze(1)
    expected, _, lse = flash_mla.flash_mla_sparse_fwd(q, keys.unsqueeze(1), padded, 1.0, 512, sinks)
    assert float((whole.lse - lse).abs().max()) <= 1e-3
    assert float((apply_sink_(whole, sinks) - expected.float()).abs().max()) <= ROUNDED


@pytest.mark.parametrize(
    ("machine", "features", "text"),
    [
        (replace(HOPPER, device="cpu", capability=None), FLASH, "device cpu is no CUDA device"),
        (replace(HOPPER, capability=(8, 9)), FLASH, "compute capability 8.9 is neither 9.0 nor 10.x"),
        (replace(HOPPER, capability=(12, 0)), FLASH, "12.0 is neither"),
        (HOPPER, replace(FLASH, dtype=torch.float32), "dtype float32 is not bfloat16"),
        (HOPPER, replace(FLASH, channels=128), "128 channels are not 512"),
        (HOPPER, replace(FLASH, heads=8), "8 heads are not 64 or 128"),  # a rank of eight
        (HOPPER, replace(FLASH, records=V4_RECORD), "packed rows are not read"),
    ],
)
def test_what_it_cannot_is_named(installed: None, machine: Machine, features: Features, text: str) -> None:
    assert text in flashmla_refusal(features, machine)
    assert flashmla_refusal(FLASH, HOPPER) == flashmla_refusal(FLASH, replace(HOPPER, capability=(10, 3))) == ""


def test_a_module_of_another_signature_is_refused(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import flash_mla

    def before_2026(q, kv, indices, sm_scale, d_v=512):
        """Its LSE is of base 2."""

    monkeypatch.setattr(flash_mla, "flash_mla_sparse_fwd", before_2026)
    assert "takes (q, kv, indices, sm_scale, d_v), known is (q, kv" in flashmla_refusal(FLASH, HOPPER)
    monkeypatch.delattr(flash_mla, "flash_mla_sparse_fwd")
    assert "flash_mla has no flash_mla_sparse_fwd" in flashmla_refusal(FLASH, HOPPER)


def test_without_the_module_tritons_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "machine_of", lambda _: HOPPER)
    chosen = choose(Op.SEGMENT_ATTENTION, FLASH, torch.device("cuda"))
    assert chosen.is_kernel
    assert chosen.function.__module__ == "redknot.ops.segment_triton"
    assert chosen.passed_over == "flash_mla is not installed"


def test_it_is_chosen_where_it_fits(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "machine_of", lambda _: replace(HOPPER, has_triton=False))
    for mode in (Mode.AUTO, Mode.KERNEL):
        chosen = choose(Op.SEGMENT_ATTENTION, FLASH, torch.device("cuda"), mode)
        assert chosen.function is flashmla.segment_attention
        assert (chosen.is_kernel, chosen.reason, chosen.passed_over) == (True, "", "")
    with pytest.raises(ConfigError, match="triton is not installed"):
        choose(Op.SEGMENT_ATTENTION, replace(FLASH, heads=8), torch.device("cuda"), Mode.KERNEL)
    assert choose(Op.SEGMENT_ATTENTION, FLASH, torch.device("cuda"), Mode.REFERENCE).function is reference
