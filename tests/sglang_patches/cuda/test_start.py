"""Where a CUDA device cannot be served on, one line says so before anything is loaded."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from redknot.errors import ConfigError
from sglang_patches import environment, launch, platform
from sglang_patches.cuda import contract, start, table
from sglang_patches.cuda.source import Source, package_folder
from sglang_patches.hooks import Process
from sglang_patches.options import Options, refuse_device
from sglang_patches.table import HOOKS, as_markdown
from tests.kit.child import NANO, ROOT

VARIABLES = (environment.ENABLED, environment._MODELS, *environment._CPU)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No variable of the plugin, nor any that a test sets left over."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def options(empty_store: Path) -> Options:
    return Options.read(str(NANO), str(empty_store), "rowsparse", None)


def said(call, *words: object) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_a_gpu_the_line_names_the_way_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = "--device cuda: no CUDA device was found on this machine; serve with --device cpu"
    assert said(refuse_device, "cuda") == line


def test_with_a_gpu_sglang_is_looked_at_and_then_the_engine(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(contract, "installed", lambda: Source(tmp_path))
    assert said(refuse_device, "cuda").startswith("this SGLang is not what --device cuda was made for: sglang.srt.")
    monkeypatch.setattr(contract, "require", lambda _: None)
    engine = tmp_path / "serving" / "engine.py"
    engine.parent.mkdir()
    monkeypatch.setattr(start, "package_folder", lambda _: tmp_path)
    engine.write_text("class ServingEngine:\n    def __init__(self, checkpoint, *, pages): ...\n")
    assert said(refuse_device, "cuda").startswith("--device cuda: the engine behind the server runs on the CPU only")
    engine.write_text("class ServingEngine:\n    def __init__(self, checkpoint, *, pages, device='cpu'): ...\n")
    refuse_device("cuda")


def test_the_engine_that_there_is_has_a_constructor_to_look_at():
    found = Source(package_folder("redknot")).parameters("serving.engine", "ServingEngine.__init__")
    assert "=pages" in found.split()


@pytest.mark.parametrize("device", ["xpu", "npu", None])
def test_other_devices_are_refused(device):
    assert "--device cpu, or with --device cuda" in said(refuse_device, device)


def arguments(**changes: object) -> Namespace:
    return Namespace(**{"device": "cuda", "tp_size": 1, "api_key": None, "json_model_override_args": "{}"} | changes)


def adapted(options: Options, monkeypatch: pytest.MonkeyPatch, **changes: object) -> Namespace:
    monkeypatch.setattr(start, "refuse", lambda: None)
    environment.enable_cuda()
    args = arguments(**changes)
    launch.adapt(args, options, vars(args))
    return args


def test_arguments_leave_the_native_model_its_own(options, clean):
    args = adapted(options, clean, dtype="bfloat16", attention_backend="dsv4", chunked_prefill_size=1000)
    assert (args.dtype, args.attention_backend, args.json_model_override_args) == ("bfloat16", "dsv4", "{}")
    assert (args.page_size, args.chunked_prefill_size, args.disable_overlap_schedule) == (256, 768, True)
    assert args.max_total_tokens % 256 == 0
    assert args.max_total_tokens >= 4 * options.geometry.max_positions
    assert launch.options_of(args) is options
    assert environment.on_cuda()
    assert environment.enabled()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"page_size": 128}, "--page-size 128: this model is served with 256"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk: prefills among decode steps cannot be used"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding"),
    ],
)
def test_what_cannot_be_served_beside_a_native_model(options, clean, changes, line):
    assert line in said(lambda: adapted(options, clean, **changes))


def test_a_model_package_of_somebody_elses_would_hide_ours(options, clean):
    clean.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "theirs")
    assert said(lambda: adapted(options, clean)).startswith("SGLANG_EXTERNAL_MODEL_PACKAGE is theirs; unset it")


@pytest.mark.parametrize(
    ("words", "cuda", "cpu"),
    [
        ("--enable-redknot --device cuda", True, False),
        ("--enable-redknot --device cpu", False, True),
        ("--enable-redknot", False, False),
        ("--device cuda", False, False),
    ],
)
def test_the_entry_point_prepares_for_the_device_that_is_written(words, cuda, cpu, clean):
    """Only the CPU gets a stand-in for SGLang's kernels."""
    installs: list[bool] = []
    clean.setattr(platform.kernels, "install", lambda: installs.append(True))
    clean.setattr("sys.argv", ["server", *words.split()])
    platform.resolve()
    platform.resolve()  # as a child does
    assert (environment.on_cuda(), environment.enabled()) == (cuda, cuda or cpu)
    assert installs == [True, True] * cpu


def test_hooks_of_a_cuda_device_take_the_place_of_those_of_the_cpu():
    found = [hook.target for process in Process for hook in table.hooks_of(process)]
    assert len(found) == len(set(found))
    assert {hook.target for hook in HOOKS} < set(found)
    assert all(hook in table.hooks_of(hook.process) for hook in table.OWN)


def test_hooks_of_a_cuda_device_are_in_the_contract():
    """What of them the table of the CPU does not check already."""
    named = {f"sglang.{call.module}.{call.name}" for call in contract.CALLS} | {hook.target for hook in HOOKS}
    assert {hook.target for hook in table.OWN} <= named


def test_the_documentation_has_their_table():
    text = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    found = text.partition("<!-- cuda hooks -->\n")[2].partition("<!-- /cuda hooks -->")[0].strip()
    assert found == as_markdown(table.OWN), "python -m sglang_patches.cuda.table prints the table"
