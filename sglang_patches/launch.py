"""From a command line to SGLang's arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from redknot.errors import RedKnotError
from sglang_patches.options import Options, add_arguments, defaults, one_line, refuse_unsupported

ATTRIBUTE = "_redknot"  # of ServerArgs; underscore attributes stay writable, and travel to the ranks


def add_cli_args(_: object, parser: argparse.ArgumentParser) -> None:
    """Hook: behind SGLang's own options."""
    add_arguments(parser)


def from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """Hook: around the making of SGLang's arguments. A user's mistake ends the process with one line."""
    if not args.enable_redknot:
        return original(cls, args)
    try:
        refuse_unsupported(args)
        options = Options.read(args.model_path, args.redknot_store, args.redknot_profile, args.redknot_config)
        for name, value in defaults(options, vars(args)).items():
            setattr(args, name, value)
    except RedKnotError as error:
        print(one_line(error), file=sys.stderr)
        raise SystemExit(2) from None
    result = original(cls, args)
    setattr(result, ATTRIBUTE, options)
    return result


def options_of(server_args: Any) -> Options | None:
    """What travelled with SGLang's arguments; None where nothing did."""
    found: Options | None = getattr(server_args, ATTRIBUTE, None)
    return found
