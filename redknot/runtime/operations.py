"""What a model's layer loop calls: a kernel or a reference for each operation, chosen once per model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from redknot.model.geometry import Geometry, LayerKind
from redknot.ops.attention import Partial
from redknot.ops.dispatch import Features, Mode, Op, choose


@dataclass(frozen=True)
class Operations:
    """See the modules of ``redknot.ops`` for what each function takes."""

    attend: Callable[..., Partial]  # segment.segment_attention
    merge: Callable[[Tensor, Tensor, Tensor | None], Partial]  # merge.merge_segments
    scores: Callable[..., Tensor]  # indexer.segment_scores
    project: Callable[..., None]  # projection.project_rows_
    experts: Callable[..., tuple[Tensor, int | Tensor]]  # moe.experts_forward
    # Whether latents are read where they lie: what the kernels do. The references are fast over turned copies.
    in_place: bool
    reasons: dict[Op, str]  # why an operation has no kernel, where one was wanted
    passed_over: str = ""  # why segment attention is not FlashMLA's, where that was looked at


def choose_operations(
    geometry: Geometry, heads: int, dtype: torch.dtype, device: torch.device, mode: Mode = Mode.AUTO
) -> Operations:
    """The operations of a rank with so many ``heads``, whose weights and latents have ``dtype``.

    ConfigError as of ``dispatch.choose``.
    """
    attention = Features(dtype, geometry.head_dim, geometry.rope_dim, heads)
    index = Features(dtype, geometry.index_head_dim, geometry.rope_dim, geometry.index_heads)
    product = Features(dtype, geometry.hidden_size)
    wanted = {
        Op.SEGMENT_ATTENTION: attention,
        Op.MERGE: attention,
        Op.PROJECTION: product,
        Op.EXPERTS: product,
    }
    if LayerKind.CSA in geometry.kinds:
        wanted[Op.SCORES] = index
    chosen = {op: choose(op, features, device, mode) for op, features in wanted.items()}
    unused = choose(Op.SCORES, index, device, Mode.REFERENCE)  # where no layer has an indexer
    return Operations(
        attend=chosen[Op.SEGMENT_ATTENTION].function,
        merge=chosen[Op.MERGE].function,
        scores=chosen.get(Op.SCORES, unused).function,
        project=chosen[Op.PROJECTION].function,
        experts=chosen[Op.EXPERTS].function,
        in_place=chosen[Op.SEGMENT_ATTENTION].is_kernel,
        reasons={op: choice.reason for op, choice in chosen.items() if choice.reason},
        passed_over=chosen[Op.SEGMENT_ATTENTION].passed_over,
    )
