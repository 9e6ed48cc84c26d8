"""Raw tensors in safetensors files: headers checked against the file before anything is allocated, then plain reads.

Tensors are read into memory of their own rather than mapped: a file that is replaced or truncated later cannot
change or kill a running process, and a rank that keeps a slice does not keep the whole file.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redknot.errors import CheckpointError

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F4": torch.uint8,  # two values a byte; the header counts values, the tensor read has bytes
}
"""Element types by their name in a header; tensors of other types are listed but cannot be read."""

_BITS = {name: 4 if name == "F4" else 8 * dtype.itemsize for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes, as in the safetensors library


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: ``nbytes`` bytes from byte ``start`` of ``file``."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def bytes_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that ``read`` returns: that of the header, but bytes for two-a-byte F4."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.dtype == "F4" else self.shape

    def read(self, rows: slice | None = None) -> Tensor:
        """The tensor, or its ``rows`` along the first dimension; raises CheckpointError when the file shrank."""
        shape, start = self.bytes_shape, self.start
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            start += first * (self.nbytes // max(1, shape[0]))
            shape = (max(0, last - first), *shape[1:])
        tensor = torch.empty(shape, dtype=DTYPES[self.dtype])
        if tensor.numel() == 0:
            return tensor
        buffer = tensor.flatten().view(torch.uint8).numpy().data
        try:
            with self.file.open("rb") as stream:
                stream.seek(start)
                done = stream.readinto(buffer)
        except OSError as error:
            raise CheckpointError(f"{self.file}: cannot be read ({error.strerror})") from None
        if done != buffer.nbytes:
            raise CheckpointError(f"{self.file}: ended inside tensor {self.name}; the file changed while it was read")
        return tensor


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a file; raises CheckpointError unless header and file size agree to the byte."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER):
                raise CheckpointError(f"{path}: not a safetensors file, or cut off inside its header ({size} bytes)")
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: _entry(path, name, fields, 8 + length) for name, fields in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{path}: not a safetensors file (its header is not understood)") from None
    end = 8 + length
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != end:
            raise CheckpointError(f"{path}: header is inconsistent: tensor {tensor.name} overlaps or leaves a gap")
        end += tensor.nbytes
    if size != end:
        state = "truncated" if size < end else "longer than it should be"
        raise CheckpointError(f"{path}: {state}: {size} bytes where the header calls for {end}")
    return tensors


def _entry(path: Path, name: str, fields: dict[str, Any], base: int) -> StoredTensor:
    dtype, shape = str(fields["dtype"]), tuple(fields["shape"])
    begin, end = fields["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end - begin)):
        raise ValueError(name)
    if dtype in _BITS and math.prod(shape) * _BITS[dtype] != 8 * (end - begin):
        raise CheckpointError(f"{path}: tensor {name} has {end - begin} bytes, which is not {dtype} {list(shape)}")
    return StoredTensor(path, name, dtype, shape, base + begin, end - begin)
