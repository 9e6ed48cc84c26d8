"""What ran where: commit, versions, device, date."""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def provenance(device: torch.device) -> dict[str, Any]:
    """JSON values; what cannot be asked is null."""
    status = _output("git", "status", "--porcelain", "--untracked-files=no")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "device": str(device),
        **_hardware(device),
    }


def _hardware(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": platform.machine(), "memory_bytes": None, "capability": None}
    found = torch.cuda.get_device_properties(device)
    return {"name": found.name, "memory_bytes": found.total_memory, "capability": [found.major, found.minor]}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
