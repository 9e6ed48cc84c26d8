"""The safetensors header as we write it; ``redknot.model.tensorfile`` reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from redknot.model.tensorfile import DTYPES as READABLE

HEADER_CAP = 16 * 2**20  # bytes
_ALIGNMENT = 64  # bytes; the payload starts on a cache line

DTYPES = {name: dtype for name, dtype in READABLE.items() if name != "F4"}
"""Element types of sections by name; packed ones have no type of their own in memory."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

TensorSpec = tuple[str, tuple[int, ...]]  # dtype name, shape


def build_header(specs: Mapping[str, TensorSpec]) -> tuple[bytes, tuple[str, ...]]:
    """Return the length prefix and header for {name: (dtype name, shape)}, and the order of the payload.

    Wide dtypes come first, so that every tensor is aligned to its own item size.
    """
    order = tuple(sorted(specs, key=lambda name: (-DTYPES[specs[name][0]].itemsize, name)))
    table: dict[str, Any] = {}
    offset = 0
    for name in order:
        dtype, shape = specs[name]
        end = offset + tensor_bytes(specs[name])
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, order


def tensor_bytes(spec: TensorSpec) -> int:
    """Return the bytes of one tensor."""
    dtype, shape = spec
    return math.prod(shape) * DTYPES[dtype].itemsize


def file_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Return the bytes of a file of these tensors, its header included."""
    return len(build_header(specs)[0]) + sum(map(tensor_bytes, specs.values()))
