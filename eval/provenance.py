"""Where results come from: code, versions, machine, model and arms, as the first record of every run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from eval.arms import Arm
from eval.results import Run
from redknot import __version__
from redknot.artifact.identity import ModelIdentity
from redknot.config import load_settings
from redknot.model.geometry import load_geometry
from redknot.runtime.identity import model_identity
from redknot.runtime.loaded import DTYPE

_ROOT = Path(__file__).resolve().parents[1]


def make_run(
    tool: str,
    checkpoint: Path,
    arms: Mapping[str, Arm],
    options: Mapping[str, Any],
    *,
    engine: str,
    tp: int,
    command: Sequence[str] | None = None,
) -> Run:
    """The record of a run that starts now; CheckpointError when the model cannot be read."""
    return Run(
        run=uuid.uuid4().hex,
        tool=tool,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        command=tuple(sys.orig_argv if command is None else command),
        commit=commit(_ROOT),
        versions={"redknot": __version__, "python": platform.python_version(), "torch": torch.__version__},
        hardware=hardware(),
        model=model_hashes(checkpoint),
        engine=engine,
        tp=tp,
        arms={name: arm.profile.model_dump(mode="json") for name, arm in arms.items()},
        digests={name: arm.profile.digest() for name, arm in arms.items()},
        options=dict(options),
    )


def checkpoint_identity(checkpoint: Path) -> ModelIdentity:
    """What the harness expects every arm to run."""
    return model_identity(checkpoint, load_geometry(checkpoint), DTYPE, load_settings().cache_dir)


def model_hashes(checkpoint: Path) -> dict[str, str]:
    """The name of a checkpoint, and the hashes of its parts."""
    identity = checkpoint_identity(checkpoint)
    return {
        "name": checkpoint.name,
        "config": identity.config_hash,
        "weights": identity.weights_hash,
        "tokenizer": identity.tokenizer_hash,
        "dtype": identity.dtype,
    }


def commit(folder: Path) -> str:
    """The commit of a work tree, with "+" behind it when tracked files differ from it; "" where there is none."""
    try:
        if Path(_git(folder, "rev-parse", "--show-toplevel")).resolve() != folder:
            return ""  # a repository around an installed package says nothing about it
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
        return _git(folder, "rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def hardware() -> dict[str, Any]:
    """The machine, as far as it can be asked."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": _memory_bytes(),
        "device": "cpu",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
