"""Where a model runs: the CPU, or a CUDA device; and how what the host planned gets there without waiting."""

from __future__ import annotations

import torch
from torch import Tensor

from redknot.errors import ConfigError

CPU = torch.device("cpu")
DEVICES = ("cpu", "cuda")


def find_device(name: str) -> torch.device:
    """The device called "cpu", "cuda" (the current one) or "cuda:N"; ConfigError where there is none."""
    kind, _, number = name.partition(":")
    if kind not in DEVICES or (":" in name and not (kind == "cuda" and number.isascii() and number.isdigit())):
        raise ConfigError(f"device {name!r} is none of {', '.join(DEVICES)}, cuda:N")
    if kind == "cpu":
        return CPU
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ConfigError(f"device {name!r}: torch {torch.__version__} finds no CUDA device; use device 'cpu'")
    index = int(number) if number else torch.cuda.current_device()
    if index >= count:
        raise ConfigError(f"device {name!r}: there are {count} CUDA devices, counted from 0")
    return torch.device("cuda", index)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device: itself on the CPU, elsewhere a copy that is queued, not waited for.

    The copy goes through pinned memory, which torch keeps until it is done; only then does the host run on. A tensor
    that lies on the device already is returned as it is.
    """
    if tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
