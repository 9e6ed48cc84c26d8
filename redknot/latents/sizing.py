"""How large the blocks, arenas and pools of a model's latent store are: from its layout, or from what a user set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from redknot.config import LATENT_ARENA_BYTES, LATENT_BYTES, LatentSettings
from redknot.errors import ConfigError
from redknot.latents.arena import ALIGNMENT
from redknot.latents.formats import FP32, round_up
from redknot.latents.layout import ModelLayout, model_layout
from redknot.latents.settings import StoreConfig
from redknot.latents.views import layout_digest
from redknot.model.geometry import Geometry

_POOL_REQUESTS = 4  # of the longest context: the one that runs, its probe, and as much again that stays as cache
_ARENA_SEGMENTS = 4096  # of a request, each of which may lose an alignment
_WORD = 8  # bytes; what the store compares blocks in


def slot_bytes(layout: ModelLayout) -> int:
    """Bytes of a block of all layers in the store: whole rows of every kind, so that its rows can be counted through.

    That is ``layout.block`` itself for V4 and nano; a geometry of odd widths is padded.
    """
    regions = chain.from_iterable(layer.entries.regions for layer in layout.layers)
    row = math.lcm(_WORD, *(region.row.nbytes for region in regions))
    return max(round_up(int(layout.block.stored), row), row)


def window_bytes(layout: ModelLayout) -> int:
    """Bytes of one token's window latents in all layers."""
    return sum(region.row.nbytes for layer in layout.layers for region in layer.window.regions)


def tail_bytes(layout: ModelLayout) -> int:
    """Bytes of the longest open tails of all layers."""
    return int(layout.arena.tail.stored)


def arena_bytes(layout: ModelLayout, tokens: int, sessions: int, segments: int) -> int:
    """Bytes of an arena for so many tokens in so many segments of so many sessions."""
    return tokens * window_bytes(layout) + sessions * tail_bytes(layout) + (segments + sessions) * ALIGNMENT


def store_config(layout: ModelLayout, settings: LatentSettings, device: str = "cpu") -> StoreConfig:
    """The store of a model on a device, what the settings leave open taken from its longest context."""
    nbytes, longest = slot_bytes(layout), layout.geometry.max_positions
    pool, arena = settings.device_bytes, settings.arena_bytes
    if pool is None:
        pool = _POOL_REQUESTS * -(-longest // layout.block_tokens) * nbytes
    if pool < nbytes:
        raise ConfigError(f"{LATENT_BYTES} is {pool}; one block of this model takes {nbytes} bytes")
    least = arena_bytes(layout, min(layout.block_tokens, longest), 1, 1)
    if arena is None:
        arena = arena_bytes(layout, longest, 1, _ARENA_SEGMENTS)
    if arena < least:
        raise ConfigError(f"{LATENT_ARENA_BYTES} is {arena}; a request of one block of this model takes {least} bytes")
    return StoreConfig(
        layout_digest([layer.entries for layer in layout.layers]),
        nbytes,
        pool,
        settings.host_bytes,
        settings.disk_bytes,
        settings.disk_folder,
        arena_bytes=arena // ALIGNMENT * ALIGNMENT,
        arenas=settings.arenas,
        device=device,
        eviction=settings.eviction,
    )


def state_blocks(geometry: Geometry) -> int:
    """Blocks that the state at the end of one page takes: a window of every layer and the longest tails."""
    layout = model_layout(geometry, FP32)
    nbytes = geometry.window * window_bytes(layout) + tail_bytes(layout)
    return -(-nbytes // slot_bytes(layout))


def sized_for_pages(geometry: Geometry, settings: LatentSettings) -> LatentSettings:
    """Where the settings leave the device pool open, as large as usual for pages, each of which has a state."""
    if settings.device_bytes is not None:
        return settings
    usual = store_config(model_layout(geometry, FP32), settings).device_bytes
    return replace(settings, device_bytes=usual * (1 + state_blocks(geometry)))


def sized_for(geometry: Geometry, lengths: Sequence[int]) -> LatentSettings:
    """Just enough for sessions of one segment each, with room for so many tokens, held at the same time."""
    layout = model_layout(geometry, FP32)
    blocks = sum(-(-length // layout.block_tokens) for length in lengths)
    tokens, sessions = max(sum(lengths), layout.block_tokens), max(len(lengths), 1)
    arena = arena_bytes(layout, tokens, sessions, sessions)
    return LatentSettings(device_bytes=max(blocks, 1) * slot_bytes(layout), arena_bytes=arena, arenas=1)
