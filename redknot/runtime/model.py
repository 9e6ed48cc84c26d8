"""One loaded model as the runtime uses it: geometry, this rank's weights, rotary frequencies, collectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from redknot.comm.group import Group, OneProcess
from redknot.model.geometry import Geometry
from redknot.model.ropespec import RopeSpec
from redknot.model.weights import ModelWeights
from redknot.ops.rope import inverse_frequencies


@dataclass(frozen=True)
class HeadSlice:
    """Some of a layer's heads, the same number in each output group, with their weights side by side."""

    wq: Tensor  # [h * d, q_lora_rank]
    sinks: Tensor  # [h]
    wo_a: Tensor  # [G, h / G * d, R], ready for a batched product
    heads: int


@dataclass
class Model:
    """A model ready to run."""

    geometry: Geometry
    weights: ModelWeights
    group: Group = field(default_factory=OneProcess)

    @cached_property
    def frequencies(self) -> dict[RopeSpec, Tensor]:
        """Inverse frequencies of both rotary kinds."""
        kinds = (self.geometry.rope_main, self.geometry.rope_compress)
        return {spec: inverse_frequencies(spec, self.geometry.rope_dim) for spec in kinds}

    @cached_property
    def _slices(self) -> dict[tuple[int, tuple[int, ...]], HeadSlice]:
        return {}

    def heads(self, layer: int, in_group: tuple[int, ...]) -> HeadSlice:
        """The heads at positions ``in_group`` of every output group of this rank."""
        key = (layer, in_group)
        if key not in self._slices:
            self._slices[key] = self._slice(layer, in_group)
        return self._slices[key]

    def all_heads(self, layer: int) -> HeadSlice:
        """Every head of this rank."""
        return self.heads(layer, tuple(range(self.geometry.heads_per_group)))

    def _slice(self, layer: int, in_group: tuple[int, ...]) -> HeadSlice:
        weights, per_group = self.weights.layers[layer].attn, self.geometry.heads_per_group
        groups, rank, _ = weights.wo_a.shape
        picked = torch.tensor([g * per_group + head for g in range(groups) for head in in_group])
        wq, sinks = weights.wq_b.flatten(0, 1), weights.sinks
        if len(in_group) < per_group:
            wq, sinks = weights.wq_b[picked].flatten(0, 1), sinks[picked]
        wo_a = weights.wo_a.view(groups, rank, per_group, -1)[:, :, list(in_group)].flatten(2)
        # A contiguous right-hand side: the transposed view costs a third of the product's rate on CPU.
        return HeadSlice(wq, sinks, wo_a.transpose(1, 2).contiguous(), len(picked))
