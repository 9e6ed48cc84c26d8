"""The latents of one model: a store whose blocks hold the entries of all layers, and typed views of its memory.

A block of the store is ``ModelLayout``'s blocks of all layers, one behind the other, in the plain fp32 layout that the
CPU engine reads; the precision is a property of the layout alone. An arena holds the window latents and open tails of
one request: state that goes with a place in it and that nobody shares.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor

from redknot.config import LATENT_BYTES, LatentSettings
from redknot.device import CPU
from redknot.latents.formats import FP32, RegionName
from redknot.latents.handles import PoolFullError
from redknot.latents.layout import model_layout
from redknot.latents.paged import RowPool
from redknot.latents.sizing import store_config, tail_bytes, window_bytes
from redknot.latents.store import LatentStore
from redknot.latents.views import row_view
from redknot.model.geometry import Geometry


class LatentSpace:
    """See the module. A context manager that closes the store."""

    def __init__(
        self,
        geometry: Geometry,
        settings: LatentSettings | None = None,
        *,
        fill: float | None = None,
        cost: Callable[[int], float] | None = None,
        device: torch.device = CPU,
    ) -> None:
        """Open the store; with ``fill`` all memory that a request gets holds it until it is written (check mode).

        ``cost`` says what it takes to run so many tokens, in FLOPs: what eviction by cost weighs blocks with. Without
        it all blocks are worth the same. ``device`` is where pool and arenas lie. StoreError where memory or folder
        cannot be had.
        """
        self.device = device
        self.geometry = geometry
        self.layout = model_layout(geometry, FP32)
        self.fill = fill
        self._cost = cost
        self.window_bytes = window_bytes(self.layout)
        self.tail_bytes = tail_bytes(self.layout)
        self.store = LatentStore(store_config(self.layout, settings or LatentSettings(), str(device)))
        self.pools = [self._pools(layer) for layer in range(geometry.num_layers)]  # by layer and kind of row

    def close(self) -> None:
        """Write what is cached to the disk tier, if there is one, and end; workspaces must be closed before."""
        if self.store.config.disk_bytes:
            self.store.flush()
        self.store.close()

    def cost(self, flops: float) -> float:
        """Of a block that takes so many FLOPs to compute again, in the unit of the store."""
        return 1.0 if self._cost is None else flops

    def block_cost(self, number: int) -> float:
        """Of running the tokens of a document's block ``number`` when what precedes it is there, as of ``cost``."""
        if self._cost is None:
            return 1.0
        tokens = self.layout.block_tokens
        return self._cost((number + 1) * tokens) - self._cost(number * tokens)

    def require(self, blocks: int) -> None:
        """PoolFullError unless so many blocks could be had now."""
        room = self.store.room()
        if blocks > room:
            raise self.pool_full(blocks, room)

    def pool_full(self, blocks: int, room: int) -> PoolFullError:
        """What to tell whoever needs ``blocks`` blocks where ``room`` can be had."""
        nbytes = self.store.config.block_bytes
        return PoolFullError(
            f"the request needs {blocks * nbytes} bytes of latents ({blocks} blocks) beside what is in use, and the "
            f"store has {room * nbytes}; raise {LATENT_BYTES}"
        )

    def windows(self, data: Tensor) -> Tensor:
        """Bytes [n * window_bytes] of an arena as window latents [layers, n, d]."""
        rows = data.view(torch.float32).view(self.geometry.num_layers, -1, self.geometry.head_dim)
        return self._poisoned(rows)

    def block(self, data: Tensor) -> None:
        """Called with the bytes of a block that a request gets, all zero."""
        self._poisoned(data.view(torch.float32))

    def _poisoned(self, values: Tensor) -> Tensor:
        return values if self.fill is None else values.fill_(self.fill)

    def _pools(self, layer: int) -> dict[RegionName, RowPool]:
        start, pool = self.layout.offsets[layer], self.store.pool
        return {
            region.name: RowPool(row_view(pool, region, start), region.row.nbytes, region.rows)
            for region in self.layout.layers[layer].entries.regions
        }

    def __enter__(self) -> LatentSpace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
