"""A batch of SGLang's as the engine wants it: rows of one request at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from redknot.serving.batch import Piece


def known_logprobs(batch: Any) -> Tensor | None:
    """As many numbers as SGLang counts logprobs of tokens that were answered before.

    They run again when a request was retracted, and one at a time among prefills. Their values are with the request,
    and these are not looked at; but without any the scheduler ends. Logprobs of a prompt are refused earlier.
    """
    if not batch.forward_mode.is_extend() or not batch.return_logprob:
        return None
    pairs = zip(batch.extend_seq_lens_cpu, batch.extend_logprob_start_lens_cpu, strict=True)
    return torch.zeros(sum(max(int(rows) - int(first), 0) for rows, first in pairs))


def piece_of(number: int, request: Any, batch: Any, input_ids: Tensor, page: int) -> Piece:
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
    """Pages of ``page`` tokens, which may be parts of SGLang's: a slot is its page's first one and a place behind."""
    from sglang.srt.model_executor.forward_context import get_req_to_token_pool

    slots = get_req_to_token_pool().req_to_token[row, :stop:page]
    pages: list[int] = (slots // page).tolist()
    return pages
