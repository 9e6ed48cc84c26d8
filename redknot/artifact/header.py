"""The safetensors header: built for writing, and checked entirely before anything is allocated for reading."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

HEADER_CAP = 16 * 2**20  # bytes
_ALIGNMENT = 64  # bytes; the payload starts on a cache line
_NAME = re.compile(r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*")

DTYPES: dict[str, torch.dtype] = {
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
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file; offsets in bytes from the start of the payload."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin


def build_header(specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, tuple[str, ...]]:
    """Return the length prefix and header for {name: (dtype name, shape)}, and the order of the payload.

    Wide dtypes come first, so that every tensor is aligned to its own item size.
    """
    order = tuple(sorted(specs, key=lambda name: (-DTYPES[specs[name][0]].itemsize, name)))
    table: dict[str, Any] = {}
    offset = 0
    for name in order:
        dtype, shape = specs[name]
        end = offset + math.prod(shape) * DTYPES[dtype].itemsize
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, order


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def parse_header(text: bytes, payload_bytes: int) -> dict[str, TensorEntry]:
    """Check a header against the payload's size and return its tensors.

    ValueError names what is wrong: not JSON, a name occurring twice or with a path in it, an unknown dtype or
    key, a shape that disagrees with its offsets, offsets that overlap, leave a gap or leave the file.
    """
    try:
        table = json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("the header is nested too deeply") from error
    if not isinstance(table, dict):
        raise ValueError("the header is not an object")
    table.pop("__metadata__", None)
    entries = {name: _parse_entry(name, raw) for name, raw in table.items()}
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            fault = "overlaps the tensor before it" if entry.begin < position else "leaves a gap before it"
            raise ValueError(f"{name} starts at byte {entry.begin} and {fault}, which ends at {position}")
        position = entry.end
    if position != payload_bytes:
        raise ValueError(f"tensors end at byte {position} of a payload of {payload_bytes}")
    return entries


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def _parse_entry(name: str, raw: object) -> TensorEntry:
    if len(name) > 200 or _NAME.fullmatch(name) is None:
        raise ValueError(f"{name[:80]!r} is not a tensor name")
    if not isinstance(raw, dict) or raw.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} has unknown dtype {str(dtype)[:20]!r}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_size, shape)):
        raise ValueError(f"{name} has a malformed shape")
    if math.prod(max(size, 1) for size in shape) >= 2**60:
        raise ValueError(f"{name} has a malformed shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise ValueError(f"{name} has malformed offsets")
    if offsets[1] - offsets[0] != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{name} holds {offsets[1] - offsets[0]} bytes, its shape needs another number")
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])
