"""A block's attention by kernels: latents stay where they lie, queries turn to the frame of each segment.

What :mod:`redknot.runtime.attention` does with turned copies of the keys and one softmax over all segments. Here every
segment gives a part, and the parts merge by log-sum-exp, the sink once. Nothing waits for the device: which rows read
what is planned on the host, and what the indexer chooses stays on the device as indices, -1 where it is not a part's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from redknot.ops.attention import Partial
from redknot.ops.rope import Rotation
from redknot.runtime.layout import Block
from redknot.runtime.reads import Entries
from redknot.runtime.scope import Scope, once

# Entries that a block may see, all rows of their pool [M, width], and which of those they are [N].
Located = tuple[Entries, Tensor, Tensor]


def attend_in_place(
    scope: Scope,
    q: Tensor,
    block: Block,
    entries: Located | None,
    chosen: tuple[Tensor, Tensor] | None,
    sinks: Tensor,
) -> Tensor:
    """Attention output [t, H, d] float32 of a block, sinks applied, from queries ``q`` [t, H, d] that are not turned.

    ``chosen`` (columns of the entries, ascending, and additive mask, [t, k] each) says which entries a row keeps; None:
    all that it sees.
    """
    parts = [*_near(scope, q, block)]
    if entries is not None:
        parts += _far(scope, q, block, entries, chosen)
    count, (rows, heads, d) = len(parts), q.shape
    outputs = torch.empty(count, rows, heads, d, device=q.device)  # not read where an LSE is -inf
    lses = torch.full((count, rows, heads), float("-inf"), device=q.device)
    for number, (part, mine) in enumerate(parts):
        if mine is None:
            outputs[number], lses[number] = part.output, part.lse
        else:
            outputs[number].index_copy_(0, mine, part.output)
            lses[number].index_copy_(0, mine, part.lse)
    return scope.model.operations.merge(outputs, lses, sinks).output


def score_in_place(scope: Scope, q: Tensor, block: Block, entries: Located, weights: Tensor) -> Tensor:
    """Indexer scores [t, N] of a block's rows, from queries ``q`` [t, Hi, di] that are not turned; hidden: -inf."""
    seen, keys, at = entries
    scores = torch.empty(len(q), seen.count, device=q.device)
    visible = scope.placed(block.cache, seen.by_part)
    for number, (lo, hi, rotation) in enumerate(_columns(scope, block, seen)):
        scores[:, lo:hi] = scope.model.operations.scores(q, rotation, keys, at[lo:hi], weights, visible[number])
    return scores


def _near(scope: Scope, q: Tensor, block: Block) -> Iterator[tuple[Partial, Tensor | None]]:
    """The parts of the windows: one for each segment, and the rows [r] that see some of it; None: all."""
    for part in block.near.parts:
        rows = None if part.rows is None else scope.placed(block.cache, part.rows)
        mine = q if rows is None else q.index_select(0, rows)
        positions = block.positions if part.rows is None else block.positions[part.rows]
        rotation = scope.rotation(block.cache, ("near", id(part)), positions - part.segment.offset)
        keys = part.segment.layers[scope.layer].window
        yield scope.model.operations.attend(mine, rotation, keys, scope.placed(block.cache, part.keys)), rows


def _far(
    scope: Scope, q: Tensor, block: Block, entries: Located, chosen: tuple[Tensor, Tensor] | None
) -> Iterator[tuple[Partial, None]]:
    """The parts of the entries, one for each segment."""
    seen, keys, at = entries
    if chosen is None:
        # ``at`` is the same tensor for all layers of a ratio until a block moves.
        rows = once(block.cache, ("far", id(at)), lambda: (at, _visible(scope, block, seen, at)))[1]
    else:
        columns, mask = chosen
        rows = torch.where(mask == 0, at[columns], -1)
    for lo, hi, rotation in _columns(scope, block, seen):
        mine = rows[:, lo:hi] if chosen is None else torch.where((columns >= lo) & (columns < hi), rows, -1)
        yield scope.model.operations.attend(q, rotation, keys, mine), None


def _visible(scope: Scope, block: Block, seen: Entries, at: Tensor) -> Tensor:
    """Rows of the pool that each row of a block sees, -1 where it does not: [t, N]."""
    visible, found = scope.placed(block.cache, seen.by_part), []
    for number, (lo, hi, _) in enumerate(_columns(scope, block, seen)):
        shown = torch.arange(hi - lo, device=at.device) < visible[number].unsqueeze(-1)
        found.append(torch.where(shown, at[lo:hi], -1))
    return torch.cat(found, dim=1)


def _columns(scope: Scope, block: Block, seen: Entries) -> Iterator[tuple[int, int, Rotation]]:
    """The columns [lo, hi) of each segment's entries, and the rows' rotation in its frame."""
    lo = 0
    for segment, count in seen.parts:
        rotation = scope.rotation(block.cache, ("frame", segment.offset), block.positions - segment.offset)
        yield lo, lo + count, rotation
        lo += count
