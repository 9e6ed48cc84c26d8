"""Dense prefill and decode over sessions, in chunks: the recompute arm, and what the builder runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from redknot.latents.segment import Segment
from redknot.latents.session import Session
from redknot.latents.workspace import Workspace
from redknot.runtime.capture import Capture
from redknot.runtime.counters import Counters
from redknot.runtime.forward import Stage, forward
from redknot.runtime.layout import RowSet
from redknot.runtime.model import Model

CHUNK_ROWS = 1024


def dense_session(memory: Workspace, length: int, capacity: int, *, closed: bool = False) -> Session:
    """A request that is one segment of ``length`` tokens, nothing of it computed, with room for ``capacity``.

    PoolFullError or ArenaFullError without room for it.
    """
    segment = Segment(offset=0, start=0, end=length, closed=closed)
    memory.allocate(segment, capacity)
    return memory.session([segment])


@torch.inference_mode()
def prefill(
    model: Model,
    sessions: list[Session],
    token_ids: list[Tensor],
    counters: Counters,
    *,
    start: int = 0,
    chunk: int = CHUNK_ROWS,
    capture: Capture | None = None,
) -> Tensor:
    """Run every row of the sessions from request position ``start`` on; returns the last rows' logits [S, vocab].

    ``token_ids`` [n_s] are whole requests. Rows run in chunks of about ``chunk`` over all sessions, cut at multiples
    of the block length; the logits do not depend on the chunk beyond float rounding.
    """
    block = model.geometry.block_length
    step = max(chunk // len(sessions) // block * block, block)
    logits: list[Tensor | None] = [None] * len(sessions)
    longest = max(len(ids) for ids in token_ids)
    for lo in range(start, longest, step):
        live = [i for i, ids in enumerate(token_ids) if len(ids) > lo]
        spans = [torch.arange(lo, min(lo + step, len(token_ids[i]))) for i in live]
        ends = torch.tensor([len(span) for span in spans]).cumsum(0) - 1
        finishing = [n for n, i in enumerate(live) if len(token_ids[i]) <= lo + step]
        ids = torch.cat([token_ids[i][span] for i, span in zip(live, spans, strict=True)])
        rows = RowSet(model.geometry, tuple(sessions[i] for i in live), tuple(spans))
        stage = Stage(range(model.geometry.num_layers), rows, ids, go_on=ends[finishing])
        out = forward(model, [stage], counters, capture)
        for n, row in zip(finishing, out, strict=True):
            logits[live[n]] = row
    return torch.stack([row for row in logits if row is not None])


@torch.inference_mode()
def prefill_pages(
    model: Model,
    session: Session,
    token_ids: Tensor,
    counters: Counters,
    *,
    final: bool = True,
    after_chunk: Callable[[], None] = lambda: None,
) -> Tensor:
    """Run the rows of ``token_ids`` [n] that a session of one segment does not hold yet, in chunks as ``prefill`` does.

    At the end of every page that a chunk completes the tails are left, until ``boundary_tails`` is cleared. Returns the
    last row's logits [1, vocab], or [0, vocab] where rows follow that are not ``final``.
    """
    segment, logits = session.segments[-1], torch.empty(0, model.geometry.vocab_size, device=model.device)
    for lo in range(segment.end, len(token_ids), CHUNK_ROWS):
        hi = min(lo + CHUNK_ROWS, len(token_ids))
        segment.end = hi
        session.mark_pages(lo, hi)
        rows = RowSet(model.geometry, (session,), (torch.arange(lo, hi),))
        wanted = torch.tensor([hi - lo - 1] if hi == len(token_ids) and final else [], dtype=torch.int64)
        stage = Stage(range(model.geometry.num_layers), rows, token_ids[lo:hi], go_on=wanted)
        logits = forward(model, [stage], counters)
        after_chunk()
    return logits


@torch.inference_mode()
def decode(model: Model, sessions: list[Session], tokens: Tensor, counters: Counters) -> Tensor:
    """Append one token to each session's last segment and return the next logits [S, vocab]."""
    positions = []
    for session in sessions:
        positions.append(torch.tensor([session.length]))
        session.segments[-1].end += 1
    rows = RowSet(model.geometry, tuple(sessions), tuple(positions))
    stage = Stage(range(model.geometry.num_layers), rows, tokens, go_on=torch.arange(len(sessions)))
    return forward(model, [stage], counters)


def greedy(model: Model, session: Session, first: int, length: int, stops: Sequence[int] = ()) -> list[int]:
    """Up to ``length`` greedy tokens, beginning with ``first``, the likeliest one behind a prefill; none of ``stops``.

    The session's last segment is open and has room for them.
    """
    tokens: list[int] = []
    token = first
    while token not in stops:
        tokens.append(token)
        if len(tokens) == length:
            break
        token = int(decode(model, [session], torch.tensor([token]), Counters())[0].argmax())
    return tokens
