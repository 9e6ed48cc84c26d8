"""A batch of SGLang's on a CUDA device, between the native model and the engine: who runs which rows.

What is decided follows from ``redknot/serving/native.py``; what is done to a batch is the CPU plugin's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from redknot.serving.batch import Outcome, Piece
from redknot.serving.engine import ServingEngine
from redknot.serving.native import Route, native_counters, route
from sglang_patches.batches import known_logprobs, piece_of
from sglang_patches.cuda.requests import is_ours, native_report
from sglang_patches.requests import REQUESTS, fail
from sglang_patches.responses import KEY


class Executor:
    """Runs batches with one engine, and counts rows by who ran them."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self.counters = native_counters()
        engine.metrics.watch("native", lambda: self.counters)

    def run(self, native: Callable[[], Any], batch: Any, input_ids: Tensor) -> Any:
        """The output of a batch; ``native`` runs all of it on the native model, and is not called where all is ours."""
        requests = (batch.model_specific_states or {}).get(REQUESTS, [])
        flags = [is_ours(request) for request in requests]
        chosen = route(flags)
        mine = [number for number, flag in enumerate(flags) if flag]
        pieces = [piece_of(number, requests[number], batch, input_ids, self._engine.page_tokens) for number in mine]
        ours = sum(piece.stop - piece.start for piece in pieces)
        self.counters["rows"] += 0 if chosen is Route.OURS else len(input_ids) - ours
        self.counters["rows_ours"] += ours
        output = None
        if chosen is not Route.OURS:
            output = native()
            self.counters["rows_shadowed"] += ours
        if pieces:
            output = self._merged(output, self._outcome(pieces, requests, mine), mine, batch, input_ids.device)
        return _with_reports(output, requests, flags)

    def _outcome(self, pieces: list[Piece], requests: list[Any], mine: list[int]) -> Outcome:
        outcome = self._engine.forward(pieces)
        for number in mine:
            request = requests[number]
            if request.rid in outcome.failures:
                fail(request, outcome.failures[request.rid])
            request.redknot_report = outcome.reports.get(request.rid)
        return outcome

    def _merged(self, output: Any, outcome: Outcome, mine: list[int], batch: Any, device: torch.device) -> Any:
        """The native output with the logits of our rows in their places; one of ours alone where there is none."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        logits = outcome.logits.to(device)
        if output is None:
            return LogitsProcessorOutput(next_token_logits=logits, input_token_logprobs=known_logprobs(batch))
        output.next_token_logits[torch.tensor(mine, device=device)] = logits.to(output.next_token_logits.dtype)
        return output


def _with_reports(output: Any, requests: list[Any], flags: list[bool]) -> Any:
    """Reports on their way out: the engine's of ours, and one line of a native request, once each."""
    reports = [
        request.__dict__.pop("redknot_report", None) if flag else native_report(request)
        for request, flag in zip(requests, flags, strict=True)
    ]
    if any(report is not None for report in reports):
        output.customized_info = {**(output.customized_info or {}), KEY: reports}
    return output
