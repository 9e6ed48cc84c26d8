"""The platform entry point: SGLang resolves it when it is first imported, in every process, before any argument.

It claims no platform. It prepares the process for serving where the command line asks for it, and changes nothing
otherwise; on a CUDA device SGLang finds the hardware and its kernels itself.
"""

from __future__ import annotations

import sys

from sglang_patches import environment, kernels
from sglang_patches.arguments import Wish, read_wish


def resolve() -> None:
    """Entry point of the group ``sglang.srt.platforms``; None: the hardware is SGLang's to find."""
    if not environment.enabled():
        wish: Wish = read_wish(sys.argv)
        if not wish.enabled or wish.device not in ("cpu", "cuda"):
            return
        if wish.device == "cpu":
            environment.enable_cpu(wish.tp_size)
        else:
            environment.enable_cuda()
    if environment.enabled() and not environment.on_cuda():
        kernels.install()
