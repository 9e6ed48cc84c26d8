"""Which tensors an artifact of a profile holds: names, dtypes and shapes as arithmetic over the geometry.

One table serves the builder (what to write), ``--dry-run`` (how many bytes) and the reader (what to expect).
"""

from __future__ import annotations

from dataclasses import dataclass

from redknot.artifact.schema import boundary_section, layer_section, shard_section
from redknot.comm.shard import Shard
from redknot.model.geometry import Geometry, LayerKind

LATENT_DTYPE = "F32"  # the CPU layout: what is read back equals what was computed, bit for bit
Z_LOCAL_DTYPE = "BF16"
STREAM_DTYPE = "F32"
Spec = tuple[str, tuple[int, ...]]


def middle_layers(geometry: Geometry, fence_layers: int) -> range:
    """Layers between the fences."""
    return range(fence_layers, geometry.num_layers - fence_layers)


@dataclass(frozen=True)
class Needs:
    """A profile's needs (``Profile.needs``), read."""

    latents: bool
    window_all: bool  # else the last window of each document
    stream_fence: int | None  # fence layers at whose entry the residual streams are kept
    split: tuple[int, tuple[int, ...]] | None  # (fence layers, Global heads of each group) of Z_L


def parse_needs(needs: tuple[str, ...]) -> Needs:
    """Read the strings that a profile states and a certificate binds."""
    streams, split = None, None
    for need in needs:
        kind, _, rest = need.partition(":")
        if kind == "streams":
            streams = int(rest)
        elif kind == "zl":
            fence, _, heads = rest.partition(":")
            split = (int(fence), tuple(int(head) for head in heads.split(",")))
    return Needs("latents" in needs, "window_all" in needs, streams, split)


def section_specs(geometry: Geometry, tokens: int, needs: tuple[str, ...], world: int = 1) -> dict[str, Spec]:
    """Every section of an artifact of ``tokens`` tokens, all ranks' shards included: name -> (dtype, shape)."""
    parsed = parse_needs(needs)
    specs: dict[str, Spec] = {}
    for layer in range(geometry.num_layers) if parsed.latents else ():
        ratio = geometry.ratio(layer)
        rows = tokens if parsed.window_all else min(tokens, geometry.window)
        specs[layer_section(layer, "window")] = (LATENT_DTYPE, (rows, geometry.head_dim))
        if ratio:
            entries = -(-tokens // ratio)
            specs[layer_section(layer, "entries")] = (LATENT_DTYPE, (entries, geometry.head_dim))
            if geometry.kinds[layer] is LayerKind.CSA:
                specs[layer_section(layer, "index_keys")] = (LATENT_DTYPE, (entries, geometry.index_head_dim))
    if parsed.stream_fence is not None:
        specs[boundary_section("streams")] = (STREAM_DTYPE, (tokens, geometry.hc_mult * geometry.hidden_size))
    if parsed.split is not None:
        for layer in middle_layers(geometry, parsed.split[0]):
            for rank in range(world):
                groups = Shard(rank, world).part(geometry.o_groups)
                width = (groups.stop - groups.start) * geometry.o_lora_rank
                specs[shard_section(layer, "zl", rank, world)] = (Z_LOCAL_DTYPE, (tokens, width))
    return specs
