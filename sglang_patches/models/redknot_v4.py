"""DeepSeek-V4 as SGLang's model: a batch becomes pieces for the engine, and its logits come back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from redknot.serving.batch import Piece
from redknot.serving.engine import ServingEngine
from sglang_patches import serving
from sglang_patches.requests import REQUESTS, fail
from sglang_patches.responses import KEY


class RedKnotV4ForCausalLM(nn.Module):
    """See the module. Latents are the engine's; SGLang's pool has no layer, and its pages are numbers alone."""

    start_layer = 0
    end_layer = 0

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.quant_config = quant_config
        self.anchor = nn.Parameter(torch.zeros(1), requires_grad=False)  # SGLang asks a model for a parameter
        self.engine: ServingEngine | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the checkpoint with the engine's own reader: it slices for this rank, and undoes quantization."""
        self.engine = serving.start()

    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any, **_: Any) -> Any:
        """Logits of the last row of every request of a batch."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        assert self.engine is not None
        requests = (forward_batch.model_specific_states or {}).get(REQUESTS, [])
        pieces = [
            _piece(number, request, forward_batch, input_ids, self.engine.page_tokens)
            for number, request in enumerate(requests)
        ]
        outcome = self.engine.forward(pieces)
        for request in requests:
            if request.rid in outcome.failures:
                fail(request, outcome.failures[request.rid])
        reports = [outcome.reports.get(request.rid) for request in requests]
        info = {KEY: reports} if any(report is not None for report in reports) else None
        return LogitsProcessorOutput(
            next_token_logits=outcome.logits,
            customized_info=info,
            input_token_logprobs=_known_logprobs(forward_batch),
        )


def _known_logprobs(batch: Any) -> Tensor | None:
    """As many numbers as SGLang counts logprobs of tokens that were answered before.

    They run again when a request was retracted, and one at a time among prefills. Their values are with the request,
    and these are not looked at; but without any the scheduler ends. Logprobs of a prompt are refused earlier.
    """
    if not batch.forward_mode.is_extend() or not batch.return_logprob:
        return None
    pairs = zip(batch.extend_seq_lens_cpu, batch.extend_logprob_start_lens_cpu, strict=True)
    return torch.zeros(sum(max(int(rows) - int(first), 0) for rows, first in pairs))


def _piece(number: int, request: Any, batch: Any, input_ids: Tensor, page: int) -> Piece:
    """Rows of one request: a chunk of its prefill, or one step of decoding, alone or in a mixed batch."""
    if batch.forward_mode.is_decode():
        stop = int(batch.seq_lens_cpu[number])
        start, first = stop - 1, number
    else:
        start = int(batch.extend_prefix_lens_cpu[number])
        stop = start + int(batch.extend_seq_lens_cpu[number])
        first = int(sum(batch.extend_seq_lens_cpu[:number]))
    known = request.full_untruncated_fill_ids
    return Piece(
        request.rid,
        start,
        stop,
        input_ids[first : first + stop - start].to(torch.int64),
        known,
        _pages(int(batch.req_pool_indices[number]), stop, page),
        final=stop >= len(known),
    )


def _pages(row: int, stop: int, page: int) -> list[int]:
    from sglang.srt.model_executor.forward_context import get_req_to_token_pool

    slots = get_req_to_token_pool().req_to_token[row, :stop:page]
    pages: list[int] = (slots // page).tolist()
    return pages


EntryClass = RedKnotV4ForCausalLM
