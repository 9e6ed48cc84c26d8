"""One loaded model as the runtime uses it: geometry, this rank's weights, rotary frequencies, collectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from redknot.comm.group import Group, OneProcess
from redknot.device import CPU, on_device
from redknot.model.geometry import Geometry
from redknot.model.ropespec import RopeSpec
from redknot.model.weights import ModelWeights
from redknot.ops.dispatch import Mode
from redknot.ops.rope import inverse_frequencies
from redknot.runtime.operations import Operations, choose_operations

if TYPE_CHECKING:  # it needs pydantic, which what runs does not
    from redknot.model.heads import Groups, HeadTable


@dataclass(frozen=True)
class HeadSlice:
    """Some of a layer's heads, the same number in each output group, with their weights side by side."""

    wq: Tensor  # [h * d, q_lora_rank]
    sinks: Tensor  # [h]
    wo_a: Tensor  # [G, h / G * d, R], ready for a batched product
    heads: int
    positions: Tensor  # [G, h / G] within each group


@dataclass
class Model:
    """A model ready to run; its weights lie on ``device``, and ``mode`` says which operations are wanted."""

    geometry: Geometry
    weights: ModelWeights
    group: Group = field(default_factory=OneProcess)
    device: torch.device = CPU
    mode: Mode = Mode.AUTO

    @cached_property
    def operations(self) -> Operations:
        """What its layers call; ConfigError where ``mode`` asks for what the device has not."""
        heads = self.geometry.num_heads // self.group.shard.world
        return choose_operations(self.geometry, heads, self.weights.embed.dtype, self.device, self.mode)

    @cached_property
    def frequencies(self) -> dict[RopeSpec, Tensor]:
        """Inverse frequencies of both rotary kinds."""
        kinds = (self.geometry.rope_main, self.geometry.rope_compress)
        return {spec: on_device(inverse_frequencies(spec, self.geometry.rope_dim), self.device) for spec in kinds}

    @cached_property
    def _slices(self) -> dict[tuple[int, Groups], HeadSlice]:
        return {}

    def heads(self, layer: int, positions: Groups) -> HeadSlice:
        """The heads at ``positions`` of each output group of this rank."""
        key = (layer, positions)
        if key not in self._slices:
            self._slices[key] = self._slice(layer, positions)
        return self._slices[key]

    def global_heads(self, layer: int, table: HeadTable) -> HeadSlice:
        """The Global heads of a layer that this rank holds."""
        return self.heads(layer, table.positions[layer][self.group.shard.part(self.geometry.o_groups)])

    def all_heads(self, layer: int) -> HeadSlice:
        """Every head of this rank."""
        groups = self.weights.layers[layer].attn.wo_a.shape[0]
        return self.heads(layer, (tuple(range(self.geometry.heads_per_group)),) * groups)

    def _slice(self, layer: int, in_groups: Groups) -> HeadSlice:
        weights, per_group = self.weights.layers[layer].attn, self.geometry.heads_per_group
        groups, rank, _ = weights.wo_a.shape
        positions = on_device(torch.tensor(in_groups), self.device)
        numbers = torch.arange(groups, device=self.device).unsqueeze(-1)
        wq, sinks = weights.wq_b.flatten(0, 1), weights.sinks
        if positions.shape[1] < per_group:
            picked = (numbers * per_group + positions).flatten()
            wq, sinks = weights.wq_b[picked].flatten(0, 1), sinks[picked]
        # [G, h / G, R, d]: the two indices side by side come first, one of each head.
        wo_a = weights.wo_a.view(groups, rank, per_group, -1).transpose(1, 2)[numbers, positions]
        # A contiguous right-hand side: the transposed view costs a third of the product's rate on CPU.
        wo_a = wo_a.transpose(2, 3).flatten(1, 2).contiguous()
        return HeadSlice(wq, sinks, wo_a, positions.numel(), positions)
