"""Reading a checkpoint folder: safetensors files into canonical tensors of the requested dtype.

Headers are read and checked first (sizes, names, dtypes, shapes, scales), so a checkpoint that cannot be served is
refused before any tensor is allocated. Tensors are then read one at a time, routed experts only as far as asked for,
and refused by name when a value is not finite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from redknot.comm.shard import SINGLE, Shard
from redknot.device import CPU
from redknot.errors import CheckpointError, ConfigError, UnsupportedModelError
from redknot.model.configfile import read_config
from redknot.model.geometry import Geometry, load_geometry
from redknot.model.names import canonical_name, expected_shapes, ignored, scale_name
from redknot.model.quant import FP8, PACKED, PLAIN, block_of_config, check_scale, logical_shape, read_weight
from redknot.model.tensorfile import StoredTensor, read_header
from redknot.model.weights import ModelWeights, build_model

INDEX = "model.safetensors.index.json"


def load_model(
    path: Path, dtype: torch.dtype = torch.float32, shard: Shard = SINGLE, device: torch.device = CPU
) -> tuple[Geometry, ModelWeights]:
    """Read one rank's weights of a checkpoint folder to a device.

    Raises CheckpointError, UnsupportedModelError or ConfigError.
    """
    geometry = load_geometry(path)
    shard.check(geometry.shardable())
    return geometry, build_model(Checkpoint(path, geometry, dtype, device), geometry, shard)


class Checkpoint:
    """The tensors of a checkpoint folder by canonical name, each moved to a device; implements ``TensorSource``.

    Every tensor returned is in memory of its own. Norms, hyper-connections, sinks, position biases and the router
    bias are always float32, the hash table is int64, everything else has the requested dtype.
    """

    def __init__(
        self, path: Path, geometry: Geometry, dtype: torch.dtype = torch.float32, device: torch.device = CPU
    ) -> None:
        """Check the folder's files against the geometry; raises CheckpointError or UnsupportedModelError."""
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(f"weights cannot be held as {dtype}; use float32, bfloat16 or float16")
        self.path, self.geometry, self.dtype, self.device = path, geometry, dtype, device
        self._block = block_of_config(read_config(path))
        self._stored = _collect(path)
        fused = {layer for layer in range(geometry.num_layers) if f"layers.{layer}.ffn.experts.w13" in self._stored}
        self._shapes = expected_shapes(geometry, fused)
        self._check()

    def tensor(self, name: str) -> Tensor:
        """The tensor of that canonical name, dequantised; raises CheckpointError when the model has no such tensor."""
        tensor = self._read(name)
        if name.endswith(".tid2eid"):
            return self._hash_table(name, tensor).to(self.device)
        small = len(self._shapes[name]) == 1 or name.endswith((".ape", "_fn"))
        return tensor.to(self.device, torch.float32 if small else self.dtype)

    def experts(self, layer: int, part: slice) -> tuple[Tensor, Tensor]:
        """Routed experts ``part``: (w1 over w3 [E, 2 * width, hidden], w2 [E, hidden, width])."""
        prefix = f"layers.{layer}.ffn.experts"
        fused = [self._stored.get(f"{prefix}.{name}") for name in ("w13", "w2")]
        if fused[0] is not None and fused[1] is not None:
            read = [_finite(stored, stored.read(part)) for stored in fused if stored is not None]
            w13, w2 = (weights.to(self.device, self.dtype) for weights in read)
            return w13, w2
        width, hidden = self.geometry.expert_width, self.geometry.hidden_size
        chosen = range(*part.indices(self.geometry.num_experts))
        w13 = torch.empty(len(chosen), 2 * width, hidden, dtype=self.dtype)
        w2 = torch.empty(len(chosen), hidden, width, dtype=self.dtype)
        for row, expert in enumerate(chosen):
            w13[row, :width] = self._read(f"{prefix}.{expert}.w1.weight")
            w13[row, width:] = self._read(f"{prefix}.{expert}.w3.weight")
            w2[row] = self._read(f"{prefix}.{expert}.w2.weight")
        return w13.to(self.device), w2.to(self.device)

    def _read(self, name: str) -> Tensor:
        if name not in self._shapes:
            raise CheckpointError(f"{self.path}: this model has no tensor {name}")
        stored = self._stored[name]
        return _finite(stored, read_weight(stored, self._stored.get(scale_name(name)), self._block))

    def _hash_table(self, name: str, table: Tensor) -> Tensor:
        experts = self.geometry.num_experts
        if bool(((table < 0) | (table >= experts)).any()):
            raise CheckpointError(f"{self.path}: tensor {name} names experts outside 0..{experts - 1}")
        return table.long()

    def _check(self) -> None:
        """Raise unless exactly the expected tensors are there, each of a known dtype, the right shape and scale."""
        used = self._shapes.keys() | {scale_name(name) for name in self._shapes}
        _refuse_unknown(self.path, [stored.name for name, stored in self._stored.items() if name not in used])
        missing = [name for name in self._shapes if name not in self._stored]
        if missing:
            raise CheckpointError(f"{self.path}: {_count(missing, 'tensor')} missing: {_few(missing)}")
        for name, shape in self._shapes.items():
            stored, scale = self._stored[name], self._stored.get(scale_name(name))
            allowed = _allowed_dtypes(name, shape)
            if stored.dtype not in allowed:
                raise UnsupportedModelError(
                    f"{stored.file}: tensor {stored.name} has dtype {stored.dtype}, supported are {', '.join(allowed)}"
                )
            found = stored.shape if name.endswith(".tid2eid") else logical_shape(stored)
            if found != shape:
                raise CheckpointError(
                    f"{stored.file}: tensor {stored.name} has shape {list(found)}, expected {list(shape)}"
                )
            if not name.endswith(".tid2eid"):
                check_scale(stored, scale, self._block)


def _finite(stored: StoredTensor, values: Tensor) -> Tensor:
    """The values as they are; raises CheckpointError when one is NaN or infinite, since every answer would be."""
    # The smallest and the largest are NaN where any value is: one pass without a copy, an eighth of a load.
    if values.is_floating_point() and not all(map(math.isfinite, map(float, values.aminmax()))):
        raise CheckpointError(f"{stored.file}: tensor {stored.name} holds values that are not finite")
    return values


def _allowed_dtypes(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Quantised are matrices only, and only routed experts are packed two values a byte."""
    if name.endswith(".tid2eid"):
        return ("I64", "I32")
    if len(shape) != 2 or not name.endswith(".weight"):
        return PLAIN
    return (*PLAIN, FP8, *PACKED) if ".ffn.experts." in name else (*PLAIN, FP8)


def _collect(path: Path) -> dict[str, StoredTensor]:
    """Canonical name -> stored tensor over all files of a folder; refuses names that mean nothing or the same."""
    stored: dict[str, StoredTensor] = {}
    unknown = []
    for file in weight_files(path):
        for name, tensor in read_header(file).items():
            canonical = canonical_name(name)
            if ignored(name):
                continue
            if canonical is None:
                unknown.append(name)
            elif canonical in stored:
                other = stored[canonical]
                raise CheckpointError(f"{file}: tensor {name} is also there as {other.name} in {other.file.name}")
            else:
                stored[canonical] = tensor
    _refuse_unknown(path, unknown)
    return stored


def weight_files(path: Path) -> list[Path]:
    """The files an index lists when there is one, else every safetensors file of the folder."""
    index = path / INDEX
    if not index.exists():
        files = sorted(path.glob("*.safetensors"))
        if files:
            return files
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
        hint = f"; {pickled[0]} is pickled and never loaded, save as safetensors" if pickled else ""
        raise CheckpointError(f"{path}: no *.safetensors files{hint}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        plain = all(Path(name).name == name for name in names)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{index}: not an index of safetensors files (no weight_map of file names)") from None
    if not names or not plain:
        raise CheckpointError(f"{index}: weight_map must name files in the same folder")
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise CheckpointError(f"{path}: {_count(missing, 'file')} listed in {INDEX} missing: {_few(missing)}")
    return [path / name for name in names]


def _refuse_unknown(path: Path, names: Sequence[str]) -> None:
    if names:
        raise UnsupportedModelError(f"{path}: {_count(names, 'tensor')} unknown to this model: {_few(names)}")


def _count(items: Sequence[str], noun: str) -> str:
    return f"1 {noun} is" if len(items) == 1 else f"{len(items)} {noun}s are"


def _few(items: Sequence[str]) -> str:
    return ", ".join(items[:3]) + (", ..." if len(items) > 3 else "")
