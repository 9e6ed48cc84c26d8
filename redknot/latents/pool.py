"""Memory of blocks: one tensor of bytes for each pool, read and written block by block."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from redknot.errors import StoreError
from redknot.latents.slots import Slots


class Pool:
    """``capacity`` blocks of ``nbytes`` bytes in one tensor [capacity, nbytes]; its memory starts undefined.

    StoreError where the system does not give it. Bytes are counted in multiples of 8, so that blocks can be compared in
    words.
    """

    def __init__(self, capacity: int, nbytes: int, device: torch.device, *, pinned: bool = False) -> None:
        try:
            self.data = torch.empty(capacity, nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        except RuntimeError as error:  # what torch raises when the system refuses
            size = f"{capacity * nbytes} bytes of {device.type} memory"
            raise StoreError(f"cannot take {size} for latents; set lower REDKNOT_LATENT_... limits") from error
        self.slots = Slots(capacity, nbytes)

    def row(self, slot: int) -> Tensor:
        """The bytes of one slot, [nbytes] uint8."""
        return self.data[slot]


def host_bytes(row: Tensor) -> memoryview:
    """A row's bytes in host memory: the row itself where it lies there, a copy where it does not."""
    view: memoryview = row.cpu().numpy().data
    return view


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two rows hold the same bytes, wherever they lie."""
    if one.device == other.device and one.device.type != "cpu":
        return torch.equal(one.view(torch.int64), other.view(torch.int64))
    # NumPy compares words in half the time that torch takes.
    return np.array_equal(one.cpu().numpy().view(np.uint64), other.cpu().numpy().view(np.uint64))
