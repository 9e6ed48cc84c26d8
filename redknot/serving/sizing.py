"""How much memory a server's latent store takes: its pages, what its requests add, and the documents it keeps."""

from __future__ import annotations

from dataclasses import replace

from redknot.config import LatentSettings
from redknot.latents.formats import FP32
from redknot.latents.layout import model_layout
from redknot.latents.sizing import arena_bytes, slot_bytes, state_blocks, store_config
from redknot.model.geometry import Geometry

_SCRATCH_ARENAS = 4  # a probe, its scratch session, windows that are rebuilt, and one to spare
_SEGMENTS = 4096  # of a request, each of which may lose an alignment


def serving_settings(
    geometry: Geometry, settings: LatentSettings, *, pages: int, requests: int, context: int
) -> LatentSettings:
    """Settings of a store for so many pages and running requests of up to ``context`` tokens.

    A page takes a block and its state; a request that reuses holds as many blocks of documents as it has pages, and a
    block more for each of its segments. What ``settings`` says of the device pool is for documents that nobody holds.
    """
    layout = model_layout(geometry, FP32)
    documents = store_config(layout, settings).device_bytes
    blocks = pages * (2 + state_blocks(geometry)) + requests * -(-context // geometry.block_length)
    per_arena = arena_bytes(layout, context + geometry.block_length, 2, _SEGMENTS)
    return replace(
        settings,
        device_bytes=blocks * slot_bytes(layout) + documents,
        arena_bytes=per_arena,
        arenas=requests + _SCRATCH_ARENAS,
    )
