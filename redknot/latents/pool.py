"""Memory of blocks: one tensor of bytes for each pool, read and written block by block."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from redknot.errors import StoreError
from redknot.latents.slots import Slots

# The C library's comparison is the fastest that there is for host memory; it lets other threads run meanwhile.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


class Pool:
    """``capacity`` blocks of ``nbytes`` bytes in one tensor [capacity, nbytes]; its memory starts undefined.

    StoreError where the system does not give it. Bytes are counted in multiples of 8, so that blocks can be compared in
    words.
    """

    def __init__(self, capacity: int, nbytes: int, device: torch.device, *, pinned: bool = False) -> None:
        try:
            self.data = own_memory(capacity, nbytes, device=device, pinned=pinned)
        except RuntimeError as error:  # what torch raises when the system refuses
            size = f"{capacity * nbytes} bytes of {device.type} memory"
            raise StoreError(f"cannot take {size} for latents; set lower REDKNOT_LATENT_... limits") from error
        self.slots = Slots(capacity, nbytes)
        # Of host memory: both are for reading what lies there in a tenth of the time that a tensor's view takes.
        self.address = self.data.data_ptr() if device.type == "cpu" else None
        self._bytes = host_bytes(self.data.view(-1)) if device.type == "cpu" else None

    def row(self, slot: int) -> Tensor:
        """The bytes of one slot, [nbytes] uint8."""
        return self.data[slot]

    def bytes_of(self, slot: int) -> memoryview:
        """The bytes of one slot in host memory: the slot itself where it lies there, a copy where it does not."""
        if self._bytes is None:
            return host_bytes(self.row(slot))
        nbytes = self.slots.nbytes
        return self._bytes[slot * nbytes : (slot + 1) * nbytes]


def own_memory(*shape: int, device: torch.device | None = None, pinned: bool = False) -> Tensor:
    """Bytes that any thread may write, in whatever mode of torch somebody opens the store: the worker has its own."""
    with torch.inference_mode(False):
        return torch.empty(*shape, dtype=torch.uint8, device=device, pin_memory=pinned)


def host_bytes(row: Tensor) -> memoryview:
    """A row's bytes in host memory: the row itself where it lies there, a copy where it does not."""
    view: memoryview = row.cpu().numpy().data
    return view


def same_bytes(one: Pool, slot: int, other: Pool, other_slot: int) -> bool:
    """Whether two slots of ``one.slots.nbytes`` bytes hold the same, wherever they lie."""
    nbytes = one.slots.nbytes
    if one.address is not None and other.address is not None:
        return not _memcmp(one.address + slot * nbytes, other.address + other_slot * nbytes, nbytes)
    if one.data.device == other.data.device:
        return torch.equal(one.row(slot).view(torch.int64), other.row(other_slot).view(torch.int64))
    return one.bytes_of(slot) == other.bytes_of(other_slot)
