"""A process that makes its own ``sglang.Engine``: no command line says what it wants, so it is told beforehand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from redknot.errors import ConfigError
from sglang_patches import environment, kernels
from sglang_patches.launch import adapt, options_of
from sglang_patches.options import Options, refuse_device
from sglang_patches.versions import check_version

_prepared: Options | None = None


def prepare(
    model_path: str | Path,
    device: str,
    store: str | Path,
    profile: str,
    config: str | Path | None,
    tp_size: int,
) -> dict[str, object]:
    """See ``sglang_patches.activate``."""
    global _prepared
    if _prepared is None and "sglang" in sys.modules:
        raise ConfigError(
            "sglang was imported before sglang_patches.activate(); SGLang chooses its platform when it is imported,"
            " so activate() comes first"
        )
    check_version()
    refuse_device(device)
    options = Options.read(str(model_path), str(store), profile, None if config is None else str(config))
    if device == "cuda":
        environment.enable_cuda()
    else:
        environment.enable_cpu(tp_size)
        kernels.install()
    _prepared = options
    # The rest is set when SGLang has the caller's other arguments too: some follow from them.
    return {"model_path": str(options.model), "device": device, "tp_size": tp_size}


def attach(server_args: Any) -> None:
    """Hook: before arguments are resolved; those of a command line have their options already."""
    if options_of(server_args) is not None:
        return
    if _prepared is None or server_args.model_path != str(_prepared.model):
        raise ConfigError(
            "these arguments did not come from sglang_patches.activate(); call it before importing sglang,"
            " and make the engine with sglang.Engine(**activate(...))"
        )
    adapt(server_args, _prepared, {name: getattr(server_args, name) for name in server_args.__struct_fields__})
