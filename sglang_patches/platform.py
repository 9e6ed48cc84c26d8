"""The platform entry point: SGLang resolves it when it is first imported, in every process, before any argument.

It claims no platform. It prepares the process for serving on the CPU where the command line asks for both, and
changes nothing otherwise.
"""

from __future__ import annotations

import sys

from sglang_patches import environment, kernels
from sglang_patches.arguments import Wish, read_wish


def resolve() -> None:
    """Entry point of the group ``sglang.srt.platforms``; None: the hardware is SGLang's to find."""
    if not environment.enabled():
        wish: Wish = read_wish(sys.argv)
        if not (wish.enabled and wish.device == "cpu"):
            return
        environment.enable_cpu(wish.tp_size)
    kernels.install()
