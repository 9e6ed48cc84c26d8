"""Evaluate documents at position zero and cut what a profile needs out of the forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from redknot.artifact.needs import parse_needs
from redknot.artifact.schema import parse_section
from redknot.artifact.sections import CHECKPOINT, middle_layers, section_specs
from redknot.comm.shard import Shard
from redknot.latents.paged import PagedRows
from redknot.latents.segment import LayerLatents
from redknot.latents.session import Session
from redknot.latents.sizing import sized_for
from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace
from redknot.model.geometry import Geometry
from redknot.runtime.capture import Capture
from redknot.runtime.counters import Counters
from redknot.runtime.model import Model
from redknot.runtime.prefill import CHUNK_ROWS, dense_session, prefill

if TYPE_CHECKING:  # it needs pydantic, which what runs does not
    from redknot.model.heads import HeadTable

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


def evaluate(
    model: Model,
    documents: Sequence[Tensor],
    needs: tuple[str, ...],
    counters: Counters,
    world: int = 1,
    chunk: int = CHUNK_ROWS,
    heads: HeadTable | None = None,
) -> list[dict[str, Tensor]]:
    """Run a batch of documents [n_i] int64, each closed and alone; returns each one's sections by name.

    ``model`` holds all heads (one process builds the shards of all ``world`` ranks). Rows
    run in forwards of about ``chunk``, as in ``prefill``. ``heads`` is the head table that the needs name by its hash;
    ValueError when they name another one.
    """
    lengths = [len(ids) for ids in documents]
    with LatentSpace(model.geometry, sized_for(model.geometry, lengths)) as space, Workspace(space) as memory:
        return evaluate_in(memory, model, documents, needs, counters, world, chunk, heads)


def evaluate_in(
    memory: Workspace,
    model: Model,
    documents: Sequence[Tensor],
    needs: tuple[str, ...],
    counters: Counters,
    world: int = 1,
    chunk: int = CHUNK_ROWS,
    heads: HeadTable | None = None,
) -> list[dict[str, Tensor]]:
    """As ``evaluate``, with latents in the caller's memory; PoolFullError or ArenaFullError without room."""
    sessions = [dense_session(memory, len(ids), len(ids), closed=True) for ids in documents]
    return _evaluate(model, sessions, documents, needs, counters, world, chunk, heads)


def _evaluate(
    model: Model,
    sessions: list[Session],
    documents: Sequence[Tensor],
    needs: tuple[str, ...],
    counters: Counters,
    world: int,
    chunk: int,
    heads: HeadTable | None,
) -> list[dict[str, Tensor]]:
    geometry = model.geometry
    parsed = parse_needs(needs)
    fence, split = parsed.stream_fence, parsed.split
    capture = Capture()
    if split is not None:
        from redknot.model.heads import named_table

        capture.heads = named_table(split[1], split[0], geometry, heads)
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
        elif section.kind.startswith(CHECKPOINT):
            at = int(section.kind.removeprefix(CHECKPOINT))
            value = torch.stack([held.window[at - shape[1] : at] for held in segment.layers])
        else:
            assert section.layer is not None
            held = segment.layers[section.layer]
            value = _latents(held, section.kind, segment.length, shape[0])
        out[name] = value.to(DTYPES[dtype]).contiguous()
    return out


def _latents(held: LayerLatents, kind: str, length: int, rows: int) -> Tensor:
    """A copy of a layer's last ``rows`` window latents of ``length``, or of its first entries or indexer keys."""
    if kind == "window":
        return held.window[length - rows : length].clone()  # the arena ends with the evaluation
    paged: PagedRows = getattr(held, kind)
    return paged[:rows]
