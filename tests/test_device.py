"""Which device: what may be asked for, and one line where it cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from redknot.device import CPU, find_device, on_device
from redknot.errors import ConfigError
from redknot.runtime.engine import Engine
from redknot.runtime.loaded import load


@pytest.mark.parametrize("name", ["", "gpu", "CUDA", "cuda:", "cuda:x", "cuda:-1", "cuda:²", "cpu:0", "meta", "cuda 0"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is none of cpu, cuda, cuda:N"):
        find_device(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_without_a_gpu_one_line_says_so(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for ask in (find_device, lambda n: load(tmp_path, device=n), lambda n: Engine(tmp_path, device=n)):
        with pytest.raises(ConfigError, match="finds no CUDA device; use device 'cpu'") as found:
            ask(name)
        assert "\n" not in str(found.value)


def test_the_current_one_and_one_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert find_device("cuda") == find_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="there are 2 CUDA devices"):
        find_device("cuda:2")


def test_on_the_cpu_nothing_is_copied() -> None:
    plan = torch.arange(3)
    assert find_device("cpu") == CPU
    assert on_device(plan, CPU) is plan
