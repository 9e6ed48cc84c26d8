"""Which tensors an artifact of a profile holds: names, dtypes and shapes as arithmetic over the geometry.

One table serves the builder (what to write), ``--dry-run`` (how many bytes) and the reader (what to expect).
"""

from __future__ import annotations

from collections.abc import Iterable

from redknot.artifact.needs import WINDOW_TAIL, WindowKind, parse_needs, stored_windows
from redknot.artifact.schema import boundary_section, layer_section, parse_section, shard_section
from redknot.comm.shard import Shard
from redknot.model.geometry import Geometry, LayerKind

LATENT_DTYPE = "F32"  # the CPU layout: what is read back equals what was computed, bit for bit
Z_LOCAL_DTYPE = "BF16"
STREAM_DTYPE = "F32"
CHECKPOINT = "windows_"  # and a position in tokens
Spec = tuple[str, tuple[int, ...]]


def middle_layers(geometry: Geometry, fence_layers: int) -> range:
    """Layers between the fences."""
    return range(fence_layers, geometry.num_layers - fence_layers)


def section_specs(geometry: Geometry, tokens: int, needs: tuple[str, ...], world: int = 1) -> dict[str, Spec]:
    """Every section of an artifact of ``tokens`` tokens, all ranks' shards included: name -> (dtype, shape)."""
    parsed = parse_needs(needs)
    specs: dict[str, Spec] = {}
    for layer in range(geometry.num_layers) if parsed.latents else ():
        ratio = geometry.ratio(layer)
        if not parsed.windows.rebuilt:
            rows = tokens if parsed.windows.kind is WindowKind.ALL else min(tokens, geometry.window)
            specs[layer_section(layer, "window")] = (LATENT_DTYPE, (rows, geometry.head_dim))
        if ratio:
            entries = -(-tokens // ratio)
            specs[layer_section(layer, "entries")] = (LATENT_DTYPE, (entries, geometry.head_dim))
            if geometry.kinds[layer] is LayerKind.CSA:
                specs[layer_section(layer, "index_keys")] = (LATENT_DTYPE, (entries, geometry.index_head_dim))
    if parsed.latents and parsed.windows.every:
        specs |= _checkpoints(geometry, tokens, parsed.windows.every * geometry.block_length)
    if parsed.stream_fence is not None:
        specs[boundary_section("streams")] = (STREAM_DTYPE, (tokens, geometry.hc_mult * geometry.hidden_size))
    if parsed.split is not None:
        for layer in middle_layers(geometry, parsed.split[0]):
            for rank in range(world):
                groups = Shard(rank, world).part(geometry.o_groups)
                width = (groups.stop - groups.start) * geometry.o_lora_rank
                specs[shard_section(layer, "zl", rank, world)] = (Z_LOCAL_DTYPE, (tokens, width))
    return specs


def _checkpoints(geometry: Geometry, tokens: int, every: int) -> dict[str, Spec]:
    """The windows at each multiple of ``every`` tokens: a section each, because a request reads one of them."""
    layers, d = geometry.num_layers, geometry.head_dim
    return {
        checkpoint_section(at): (LATENT_DTYPE, (layers, min(at, geometry.window), d))
        for at in range(every, tokens + 1, every)
    }


def checkpoint_section(position: int) -> str:
    """The window rows in front of a position, of all layers: [layers, min(position, w), d]."""
    return boundary_section(f"{CHECKPOINT}{position}")


def read_specs(
    geometry: Geometry,
    tokens: int,
    needs: tuple[str, ...],
    held: Iterable[str],
    world: int,
    checkpoints: Iterable[int],
) -> dict[str, Spec]:
    """The sections that a profile of ``needs`` reads of an artifact that was built for the needs ``held``.

    ``checkpoints`` are the positions of those that its requests begin to recompute at. An artifact that serves several
    profiles may keep all window rows where this one asks for the last ones.
    """
    windows, wanted = stored_windows(held), set(needs)
    if windows.rebuilt:
        wanted -= {WINDOW_TAIL}
    if windows.kind is not WindowKind.TAIL and "latents" in wanted:
        wanted |= {windows.need}
    read = {checkpoint_section(position) for position in checkpoints}
    specs = section_specs(geometry, tokens, tuple(sorted(wanted)), world)
    return {name: spec for name, spec in specs.items() if name in read or not is_checkpoint(name)}


def is_checkpoint(name: str) -> bool:
    """Whether a section holds the windows of a checkpoint."""
    return parse_section(name).kind.startswith(CHECKPOINT)
