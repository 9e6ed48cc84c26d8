"""Whether this machine and this SGLang can serve on a CUDA device, before anything is loaded; and its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from redknot.errors import ConfigError
from redknot.latents.layout import SGLANG_PAGE_TOKENS
from sglang_patches import environment
from sglang_patches.cuda import contract
from sglang_patches.cuda.source import Source, package_folder
from sglang_patches.options import Options, defaults, refuse_other, whole_pages

_OUT = "serve with --device cpu"
# What splits or mixes batches behind the model's back.
_REFUSED = {"enable_mixed_chunk": "prefills among decode steps", "enable_two_batch_overlap": "two batches at a time"}
# Of the CPU's arguments: the native model has its own.
_CPU_ONLY = ("json_model_override_args", "dtype", "attention_backend", "tool_call_parser", "sleep_on_idle")


def refuse() -> None:
    """ConfigError, in one line with the way out, where --device cuda cannot be served."""
    if not torch.cuda.is_available():
        raise ConfigError(f"--device cuda: no CUDA device was found on this machine; {_OUT}")
    contract.require(contract.installed())
    own = package_folder("redknot")
    assert own is not None
    if "=device" not in (Source(own).parameters("serving.engine", "ServingEngine.__init__") or "").split():
        raise ConfigError(f"--device cuda: the engine behind the server runs on the CPU only in this version; {_OUT}")


def refuse_unsupported(args: Any) -> None:
    """ConfigError for a feature beside which rows of ours could not be told from native ones."""
    for name, meaning in _REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(
                f"--{name.replace('_', '-')}: {meaning} cannot be used with --enable-redknot --device cuda"
            )
    if package := environment.foreign_models():
        raise ConfigError(f"SGLANG_EXTERNAL_MODEL_PACKAGE is {package}; unset it, the model of RedKnot is found by it")


def cuda_defaults(options: Options, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SGLang's arguments; ``given`` are the user's, None where there is none.

    The scheduler waits for a forward before it gives pages away: with overlap it would be ahead of the engine.
    """
    refuse_other("--page-size", given.get("page_size"), (SGLANG_PAGE_TOKENS,))
    found = defaults(options, {**given, "page_size": None, **dict.fromkeys(_CPU_ONLY)})
    for name in _CPU_ONLY:
        del found[name]
    return found | {
        "page_size": SGLANG_PAGE_TOKENS,
        "max_total_tokens": -(-found["max_total_tokens"] // SGLANG_PAGE_TOKENS) * SGLANG_PAGE_TOKENS,
        "chunked_prefill_size": whole_pages(given.get("chunked_prefill_size"), SGLANG_PAGE_TOKENS),
        "disable_overlap_schedule": True,
    }
