"""Raw tensors in safetensors files: headers checked against the file before anything is allocated, then plain reads.

The one reader of such files. Checkpoints are read by ``read_header`` and ``StoredTensor.read``; whoever must tell a
damaged file from a failing disk takes ``read_table`` and ``StoredTensor.load``.

Tensors are read into memory of their own rather than mapped: a file that is replaced or truncated later cannot
change or kill a running process, and a rank that keeps a slice does not keep the whole file.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redknot.errors import CheckpointError, RedKnotError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F4": torch.uint8,  # two values a byte; the header counts values, the tensor read has bytes
}
"""Element types by their name in a header; tensors of other types are listed but cannot be read."""

_BITS = {name: 4 if name == "F4" else 8 * dtype.itemsize for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes, as in the safetensors library
_MAX_AXES = 8
_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


class BrokenFileError(RedKnotError):
    """A file that is no regular file, or whose content is not what its format, size or header calls for."""


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
        with _checkpoint_errors(self.file):
            return self.load(rows)

    def load(self, rows: slice | None = None) -> Tensor:
        """As ``read``, but BrokenFileError when the file shrank, and OSError from the disk."""
        shape, start = self.bytes_shape, self.start
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            start += first * (self.nbytes // max(1, shape[0]))
            shape = (max(0, last - first), *shape[1:])
        tensor = torch.empty(shape, dtype=DTYPES[self.dtype])
        if tensor.numel():
            self._fill(tensor.flatten().view(torch.uint8).numpy().data, start)
        return tensor

    def _fill(self, target: memoryview, start: int) -> None:
        descriptor = open_regular(self.file)
        try:
            done = 0
            while done < len(target):  # the kernel reads at most 2 GB at once
                count = os.preadv(descriptor, [target[done:]], start + done)
                if count == 0:
                    raise BrokenFileError(
                        f"{self.file}: ended inside tensor {self.name}; the file changed while it was read"
                    )
                done += count
        finally:
            os.close(descriptor)


def open_regular(path: Path) -> int:
    """Open a file for reading and return its descriptor; BrokenFileError for anything but a regular file, or OSError.

    Never waits: a FIFO without a writer would hold up ``open`` for ever.
    """
    _check_regular(path, os.stat(path).st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise BrokenFileError(f"{path}: cannot be read (it is {kind}, not a regular file)")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a file; raises CheckpointError unless header and file size agree to the byte."""
    with _checkpoint_errors(path):
        return read_table(path, _MAX_HEADER)


def read_table(path: Path, max_header: int) -> dict[str, StoredTensor]:
    """As ``read_header``, but BrokenFileError for the file, also above ``max_header`` bytes, and OSError from the disk.

    At most the header is read; nothing is allocated for tensors.
    """
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        prefix = os.pread(descriptor, 8, 0)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, max_header):
            raise BrokenFileError(
                f"{path}: not a safetensors file, or cut off inside its header of {length} bytes "
                f"(file of {size} bytes, header cap {max_header})"
            )
        text = os.pread(descriptor, length, 8)
    finally:
        os.close(descriptor)
    tensors = _parse(path, text)
    _check_offsets(path, tensors.values(), 8 + length, size)
    return tensors


def _parse(path: Path, text: bytes) -> dict[str, StoredTensor]:
    try:
        header = json.loads(text, object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        return {name: _entry(path, name, fields, 8 + len(text)) for name, fields in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BrokenFileError(f"{path}: not a safetensors file (its header is not understood)") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _entry(path: Path, name: str, fields: dict[str, Any], base: int) -> StoredTensor:
    if fields.keys() != {"dtype", "shape", "data_offsets"} or not name.isprintable():
        raise ValueError(name)
    dtype, shape = str(fields["dtype"]), tuple(fields["shape"])
    begin, end = fields["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end - begin)):
        raise ValueError(name)
    if dtype in _BITS and math.prod(shape) * _BITS[dtype] != 8 * (end - begin):
        raise BrokenFileError(f"{path}: tensor {name} has {end - begin} bytes, which is not {dtype} {list(shape)}")
    # Empty, and yet more than a tensor may count.
    if len(shape) > _MAX_AXES or math.prod(max(length, 1) for length in shape) >= 1 << 60:
        raise ValueError(name)
    return StoredTensor(path, name, dtype, shape, base + begin, end - begin)


def _check_offsets(path: Path, tensors: Iterable[StoredTensor], end: int, size: int) -> None:
    """Raise BrokenFileError unless tensors fill the file from byte ``end`` to its ``size`` without gap or overlap."""
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != end:
            raise BrokenFileError(f"{path}: header is inconsistent: tensor {tensor.name} overlaps or leaves a gap")
        end += tensor.nbytes
    if size != end:
        state = "truncated" if size < end else "longer than it should be"
        raise BrokenFileError(f"{path}: {state}: {size} bytes where the header calls for {end}")


@contextmanager
def _checkpoint_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except BrokenFileError as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
