"""What an offline forward writes down for artifacts while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Capture:
    """Collects, chunk by chunk, the Local heads' contribution and the residual streams a profile needs."""

    local_heads: tuple[int, ...] = ()  # positions within each output group
    global_heads: tuple[int, ...] = ()
    local_layers: range = range(0)  # layers whose Z_L is kept
    stream_layer: int | None = None  # the layer at whose entry the residual streams are kept
    z_local: dict[int, list[Tensor]] = field(default_factory=dict)
    streams: list[Tensor] = field(default_factory=list)

    def before_layer(self, layer: int, streams: Tensor) -> None:
        """Called with the residual streams [T, hc, hidden] that enter a layer."""
        if layer == self.stream_layer:
            self.streams.append(streams.clone())

    def wants_local(self, layer: int) -> bool:
        """Whether this layer's heads run in two parts, so that Z_L can be kept."""
        return layer in self.local_layers

    def local(self, layer: int, z_local: Tensor) -> None:
        """Called with Z_L [T, G_rank * R] of a layer."""
        self.z_local.setdefault(layer, []).append(z_local)
