"""The general entry point: every process of SGLang calls it before it does its work."""

from __future__ import annotations

import multiprocessing
import sys

from redknot.errors import ConfigError
from sglang_patches import environment
from sglang_patches.arguments import read_wish
from sglang_patches.hooks import Process, apply


def load() -> None:
    """Entry point of the group ``sglang.srt.plugins``; without ``--enable-redknot`` nothing is changed.

    SGLang logs an error of a plugin and goes on without it; a server that was asked to reuse and cannot must not.
    """
    wish, child = read_wish(sys.argv), multiprocessing.parent_process() is not None
    if not (environment.enabled() or wish.enabled or wish.help):
        return
    try:
        _load(child, only_options=wish.help and not wish.enabled)
    except ConfigError as error:
        print(f"redknot: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _load(child: bool, *, only_options: bool) -> None:
    from sglang_patches.versions import check_version

    check_version()
    from sglang_patches.table import OPTIONS, hooks_of

    if only_options:
        apply(OPTIONS)
        return
    process = Process.CHILD if child else Process.PARENT
    if environment.on_cuda() and child:
        from sglang_patches.cuda import contract, table

        contract.require(contract.installed())
        apply(table.hooks_of(process))
    else:
        apply(hooks_of(process))
