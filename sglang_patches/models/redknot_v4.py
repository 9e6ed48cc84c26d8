"""DeepSeek-V4 as SGLang's model: a batch becomes pieces for the engine, and its logits come back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from redknot.serving.engine import ServingEngine
from sglang_patches import serving
from sglang_patches.batches import known_logprobs, piece_of
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
            piece_of(number, request, forward_batch, input_ids, self.engine.page_tokens)
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
            input_token_logprobs=known_logprobs(forward_batch),
        )


EntryClass = RedKnotV4ForCausalLM
