"""The merge of many segments' partial attention by log-sum-exp, the sink once: the torch reference of the kernel."""

from __future__ import annotations

from torch import Tensor

from redknot.ops.attention import Partial, apply_sink_, merge_


def merge_segments(outputs: Tensor, lses: Tensor, sinks: Tensor | None) -> Partial:
    """Merge P parts: ``outputs`` [P, T, H, d] and ``lses`` [P, T, H] -> output [T, H, d] and LSE of all keys [T, H].

    Where an LSE is -inf the row saw nothing in that part, and its output is not read: it may be unset memory.
    ``sinks`` [H] take their share of the output (not of the LSE), as in ``apply_sink_``; None: no sink.
    """
    whole = Partial(outputs.new_zeros(outputs.shape[1:]), lses.new_full(lses.shape[1:], float("-inf")))
    for output, lse in zip(outputs, lses, strict=True):
        empty = (lse == float("-inf")).unsqueeze(-1)
        merge_(whole, Partial(output.masked_fill(empty, 0.0), lse))
    if sinks is not None:
        apply_sink_(whole, sinks)
    return whole
