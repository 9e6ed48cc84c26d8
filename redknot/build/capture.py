"""Evaluate documents at position zero and cut what a profile needs out of the forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from redknot.artifact.schema import parse_section
from redknot.artifact.sections import middle_layers, parse_needs, section_specs
from redknot.comm.shard import Shard
from redknot.latents.session import Session
from redknot.model.geometry import Geometry
from redknot.runtime.capture import Capture
from redknot.runtime.counters import Counters
from redknot.runtime.model import Model
from redknot.runtime.prefill import CHUNK_ROWS, dense_session, prefill

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


def evaluate(
    model: Model,
    documents: Sequence[Tensor],
    needs: tuple[str, ...],
    counters: Counters,
    world: int = 1,
    chunk: int = CHUNK_ROWS,
) -> list[dict[str, Tensor]]:
    """Run a batch of documents [n_i] int64, each closed and alone; returns each one's sections by name.

    ``model`` holds all heads (one process builds the shards of all ``world`` ranks). Rows
    run in forwards of about ``chunk``, as in ``prefill``.
    """
    geometry = model.geometry
    sessions = [dense_session(geometry, len(ids), len(ids), closed=True) for ids in documents]
    parsed = parse_needs(needs)
    fence, split = parsed.stream_fence, parsed.split
    capture = Capture()
    if split is not None:
        chosen = split[1]
        capture.local_heads = tuple(head for head in range(geometry.heads_per_group) if head not in chosen)
        capture.local_layers = middle_layers(geometry, split[0])
    if fence is not None:
        capture.stream_layer = geometry.num_layers - fence
    prefill(model, sessions, list(documents), counters, chunk=chunk, capture=capture)
    streams = capture.streams_by_session(sessions) if fence is not None else {}
    local = {layer: capture.local_by_session(layer, sessions) for layer in capture.local_layers}
    return [
        _sections(
            geometry, session, needs, world, streams.get(id(session)), {k: v[id(session)] for k, v in local.items()}
        )
        for session in sessions
    ]


def _sections(
    geometry: Geometry,
    session: Session,
    needs: tuple[str, ...],
    world: int,
    streams: Tensor | None,
    local: dict[int, Tensor],
) -> dict[str, Tensor]:
    """One document's sections, exactly those its needs declare."""
    segment = session.segments[0]
    out: dict[str, Tensor] = {}
    for name, (dtype, shape) in section_specs(geometry, segment.length, needs, world).items():
        section = parse_section(name)
        if section.kind == "streams":
            assert streams is not None
            value = streams.flatten(1)
        elif section.kind == "zl":
            assert section.layer is not None
            assert section.rank is not None
            groups = Shard(section.rank, world).part(geometry.o_groups)
            rank = geometry.o_lora_rank
            value = local[section.layer][:, groups.start * rank : groups.stop * rank]
        else:
            assert section.layer is not None
            value = getattr(segment.layers[section.layer], section.kind)
            value = value[value.shape[0] - shape[0] :] if section.kind == "window" else value[: shape[0]]
        out[name] = value.to(DTYPES[dtype]).contiguous()
    return out
