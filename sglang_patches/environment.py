"""The environment variables that SGLang reads too early to be told otherwise, and the one that tells our children.

No other module of this package reads or writes the environment.
"""

from __future__ import annotations

import os

ENABLED = "REDKNOT_SGLANG"  # set for this process and its children: the plugin is to do its work, on which device
_ON_CPU, _ON_CUDA = "1", "cuda"
_CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",  # decides the platform at import time, before arguments are parsed
    # pynccl is tried wherever its library loads, also on a CPU; there it ends the rank.
    "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so",
}
_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
_CUDA_MODELS = "sglang_patches.cuda.models"
_UNHOOKED = ("SGLANG_RUST_SERVER", "SGLANG_GRPC_PORT")
_BINDING = "SGLANG_CPU_OMP_THREADS_BIND"


def enabled() -> bool:
    """Whether this process, or the one that started it, serves with the plugin."""
    return os.environ.get(ENABLED) in (_ON_CPU, _ON_CUDA)


def on_cuda() -> bool:
    """Whether it serves on a CUDA device."""
    return os.environ.get(ENABLED) == _ON_CUDA


def unhooked_server() -> str | None:
    """The variable, if any, that makes SGLang open a server which none of our hooks reaches, in Rust."""
    return next(
        (name for name in _UNHOOKED if os.environ.get(name, "").lower() not in ("", "0", "false", "no", "n")), None
    )


def enable_cpu(tp_size: int) -> None:
    """Let this process and its children run SGLang on the CPU with our model; what a user set stays."""
    os.environ[ENABLED] = _ON_CPU
    for name, value in _CPU.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault(_MODELS, "sglang_patches.models")
    if tp_size > 1:
        # A group of cores per rank is asked for; cores may repeat, and binding is not applied on every machine.
        cores = sorted(os.sched_getaffinity(0))
        os.environ.setdefault(_BINDING, "|".join(str(cores[rank % len(cores)]) for rank in range(tp_size)))


def enable_cuda() -> None:
    """Let the plugin work in this process and its children, on a CUDA device."""
    os.environ[ENABLED] = _ON_CUDA


def find_cuda_model() -> None:
    """Let children find our model over the native one; this process has no use for it, and may have no GPU either."""
    os.environ.setdefault(_MODELS, _CUDA_MODELS)


def foreign_models() -> str:
    """The package, if any, that SGLang would find models in where ours should be."""
    found = os.environ.get(_MODELS, "")
    return "" if found == _CUDA_MODELS else found


def for_builder() -> dict[str, str]:
    """The environment of a build beside a server: half the cores, so that its threads do not spin against ours."""
    threads = max(len(os.sched_getaffinity(0)) // 2, 1)
    found = {name: value for name, value in os.environ.items() if name not in (ENABLED, _MODELS, *_CPU)}
    return found | {"OMP_NUM_THREADS": str(threads)}
