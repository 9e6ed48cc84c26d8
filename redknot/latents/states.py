"""States of any length in a latent store: bytes under a key, over as many blocks as they take.

They are cache like the blocks of documents: counted in the same books, evicted by the same policy, in the same tiers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from redknot.device import on_device
from redknot.latents.handles import PoolFullError
from redknot.latents.segment import Segment
from redknot.latents.workspace import Workspace


class State:
    """Room for ``nbytes`` bytes under ``key``, found or to be filled; ``memory`` holds it until it is closed."""

    def __init__(self, memory: Workspace, key: bytes, nbytes: int) -> None:
        """Look for the state; where the pool has no room for what is missing of it, it is neither found nor kept."""
        self._space = memory.space
        store = self._space.store
        self._pool, self._nbytes = store.pool.view(-1, store.config.block_bytes), nbytes
        self._keys = [key + number.to_bytes(4, "little") for number in range(-(-nbytes // self._pool.shape[1]))]
        self._segment = Segment(0, 0, 0, closed=True)  # a segment without tokens, of blocks alone
        self._missing: list[int] = []
        try:
            self._missing = memory.find(self._segment, self._keys)
        except PoolFullError:
            self._segment.blocks = None

    def read(self) -> Tensor | None:
        """The state, uint8 [nbytes], copied; None when any of it is missing."""
        if self._segment.blocks is None or self._missing:
            return None
        return self._pool[self._rows()].flatten()[: self._nbytes]

    def write(self, data: Tensor, flops: float) -> None:
        """Keep ``data`` [nbytes] uint8 under the key, for others to find; not without room, or where it was found.

        Its blocks share what it takes to compute it again.
        """
        if self._segment.blocks is None or not self._missing:
            return
        missing = on_device(torch.tensor(self._missing), self._pool.device)
        values = pad(data, (0, len(self._keys) * self._pool.shape[1] - self._nbytes)).view(-1, self._pool.shape[1])
        self._pool[self._rows()[missing]] = values[missing]
        cost = self._space.cost(flops / len(self._keys))
        for number in self._missing:
            self._segment.blocks.publish(number, self._keys[number], cost)
        self._missing = []

    def _rows(self) -> Tensor:
        """Which rows of the pool the blocks are."""
        assert self._segment.blocks is not None
        return on_device(self._segment.blocks.offsets // self._pool.shape[1], self._pool.device)
