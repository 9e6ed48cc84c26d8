"""From a command line to SGLang's arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

from redknot.errors import ConfigError, RedKnotError
from sglang_patches import environment
from sglang_patches.options import Options, add_arguments, defaults, one_line, refuse_unsupported

ATTRIBUTE = "_redknot"  # of ServerArgs; underscore attributes stay writable, and travel to the ranks


def add_cli_args(_: object, parser: argparse.ArgumentParser) -> None:
    """Hook: behind SGLang's own options."""
    add_arguments(parser)


def from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """Hook: around the making of SGLang's arguments. A user's mistake ends the process with one line."""
    try:
        if not args.enable_redknot:
            raise ConfigError(f"{environment.ENABLED} is set, but --enable-redknot is not given")
        options = Options.read(args.model_path, args.redknot_store, args.redknot_profile, args.redknot_config)
        adapt(args, options, vars(args))
    except RedKnotError as error:
        print(one_line(error), file=sys.stderr)
        raise SystemExit(2) from None
    result = original(cls, args)
    setattr(result, ATTRIBUTE, options)
    return result


def is_diffusion(_: object, __: str) -> bool:
    """Hook: around the question whether a model makes pictures; for a name it would be asked of a model hub."""
    return False


def adapt(args: Any, options: Options, given: Mapping[str, Any]) -> None:
    """Set what this model needs of SGLang's arguments; ConfigError for what it cannot do. ``given`` are the user's."""
    refuse_unsupported(args)
    if not environment.enabled():
        raise ConfigError(
            "this process was not prepared for the CPU; write --device cpu in full, and leave SGLANG_PLATFORM unset"
        )
    if variable := environment.unhooked_server():
        raise ConfigError(
            f"{variable} cannot be used with --enable-redknot: that server knows no API keys and no reports"
        )
    if args.api_key and options.config.api_keys:
        raise ConfigError("--api-key and the api_keys of --redknot-config cannot be used together")
    for name, value in _prepared(args, options, given).items():
        setattr(args, name, value)
    setattr(args, ATTRIBUTE, options)


def _prepared(args: Any, options: Options, given: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare the environment of the ranks for their device; the arguments that this model needs there."""
    if args.device != "cuda":
        environment.enable_cpu(args.tp_size)
        return defaults(options, given)
    from sglang_patches.cuda import start

    start.refuse_unsupported(args)
    environment.enable_cuda()
    environment.find_cuda_model()
    return start.cuda_defaults(options, given)


def options_of(server_args: Any) -> Options | None:
    """What travelled with SGLang's arguments; None where nothing did."""
    found: Options | None = getattr(server_args, ATTRIBUTE, None)
    return found
