"""Collectives that the model and the agreement need, for one process and for torch.distributed."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from redknot.comm.shard import SINGLE, Shard


class Group(Protocol):
    """The ranks that hold one model together."""

    @property
    def shard(self) -> Shard:
        """This process's place among them."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; returns the tensor."""

    def all_agree(self, mine: bool) -> bool:
        """Whether every rank says yes."""


class OneProcess:
    """A model in one process: nothing to exchange."""

    shard = SINGLE

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def all_agree(self, mine: bool) -> bool:
        """One voice."""
        return mine


class TorchGroup:
    """Ranks of an initialised ``torch.distributed`` process group (gloo on CPU)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.shard = Shard(dist.get_rank(group), dist.get_world_size(group))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_agree(self, mine: bool) -> bool:
        """A minimum over votes; every rank must take part."""
        vote = torch.tensor([int(mine)])
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._group)
        return bool(vote.item())
