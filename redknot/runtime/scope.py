"""What every step of one layer needs to know, and what the layer's input becomes row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from torch import Tensor
from torch.nn.functional import linear

from redknot.device import on_device
from redknot.model.geometry import Geometry
from redknot.model.weights import AttentionWeights
from redknot.ops.rope import Rotation, rotation_at
from redknot.runtime.capture import Capture
from redknot.runtime.counters import Counters
from redknot.runtime.model import Model

Cache = dict[object, object]  # of a row set or a block: what its layers share
_Made = TypeVar("_Made")


def once(cache: Cache, key: object, make: Callable[[], _Made]) -> _Made:
    """What is kept under ``key``, made on first use; a key stands for one kind of thing."""
    if key not in cache:
        cache[key] = make()
    return cast(_Made, cache[key])


@dataclass(frozen=True)
class Scope:
    """One layer of one forward: what every step of it needs to know."""

    model: Model
    layer: int
    counters: Counters
    capture: Capture | None = None

    @property
    def geometry(self) -> Geometry:
        """The model's geometry."""
        return self.model.geometry

    @property
    def weights(self) -> AttentionWeights:
        """This layer's attention weights."""
        return self.model.weights.layers[self.layer].attn

    @property
    def ratio(self) -> int:
        """Tokens per entry of this layer, 0 without entries."""
        return self.geometry.ratio(self.layer)

    @property
    def frequencies(self) -> Tensor:
        """Inverse frequencies of this layer's rotary kind."""
        return self.model.frequencies[self.geometry.rope(self.layer)]

    def rotation(self, cache: Cache, owner: object, positions: Tensor) -> Rotation:
        """The rotation of ``positions`` on this layer's rotary kind, made once per ``owner`` in ``cache``."""
        key = ("rotation", owner, self.geometry.rope(self.layer))
        return once(cache, key, lambda: rotation_at(on_device(positions, self.model.device), self.frequencies))

    def placed(self, cache: Cache, plan: Tensor) -> Tensor:
        """A tensor of a plan, which the host made, where the model runs; copied there once per ``cache``."""
        if plan.device == self.model.device:
            return plan
        # The host's tensor is kept too: its id stands for it.
        return once(cache, ("placed", id(plan)), lambda: (plan, on_device(plan, self.model.device)))[1]


@dataclass(frozen=True)
class Projections:
    """What a layer's input becomes, row by row (see ``AttentionWeights.in_sizes``)."""

    latent: Tensor
    comp_kv: Tensor
    comp_gate: Tensor
    index_kv: Tensor
    index_gate: Tensor
    q_a: Tensor
    index_weights: Tensor

    def of(self, rows: Tensor) -> Projections:
        """The projections of some rows."""
        return Projections(*(tensor[rows] for tensor in vars(self).values()))


def project(scope: Scope, x: Tensor) -> Projections:
    """All projections of the normalised input ``x`` [T, hidden]."""
    weights = scope.weights
    scope.counters.add_product(x.shape[0], x.shape[1], weights.w_in.shape[0])
    return Projections(*linear(x, weights.w_in).split(weights.in_sizes, dim=-1))
