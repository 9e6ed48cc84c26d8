"""The native model with an executor beside it: rows of requests that reuse are the engine's, all others stay native.

It has the native class's name, because SGLang goes by that name where it chooses V4's pools, pages and attention
backend; it is found first since SGLang looks into this package before its own. SGLang's module needs kernels for a GPU
and is imported when the class is asked for: an error there ends the rank, where SGLang would only log that of an import
of ours and go on without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from torch import Tensor

from sglang_patches import serving
from sglang_patches.cuda.executor import Executor


def extended(native: type) -> type:
    """The class, over the native one."""

    class DeepseekV4ForCausalLM(native):  # type: ignore[valid-type, misc]
        """See the module."""

        executor: Executor | None = None  # until weights are there

        def load_weights(self, weights: Iterable[tuple[str, Tensor]], is_nextn: bool = False) -> Any:
            """Load both: the native weights, and behind them, once, the engine with its own reader."""
            loaded = super().load_weights(weights, is_nextn)
            if self.executor is None:
                self.executor = Executor(serving.start(device="cuda"))
            return loaded

        def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            """Logits of the last row of every request of a batch."""

            def run() -> Any:
                return super(DeepseekV4ForCausalLM, self).forward(input_ids, positions, forward_batch, *args, **kwargs)

            return run() if self.executor is None else self.executor.run(run, forward_batch, input_ids)

    return DeepseekV4ForCausalLM


@lru_cache(maxsize=1)
def _entry_class() -> type:
    from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM

    return extended(DeepseekV4ForCausalLM)


def __getattr__(name: str) -> Any:
    if name == "EntryClass":
        return _entry_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
