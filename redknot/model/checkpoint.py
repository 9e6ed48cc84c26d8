"""Reading a checkpoint folder: safetensors files into canonical tensors of the requested dtype.

Headers are read and checked first (sizes, names, shapes), so a checkpoint that cannot be served is refused before
any tensor is allocated. Tensors are then read one at a time, routed experts only as far as they are asked for.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from redknot.comm.shard import SINGLE, Shard
from redknot.errors import CheckpointError, UnsupportedModelError
from redknot.model.geometry import Geometry, load_geometry
from redknot.model.names import canonical_name, expected_shapes, ignored
from redknot.model.weights import ModelWeights, build_model


def load_model(path: Path, dtype: torch.dtype = torch.float32, shard: Shard = SINGLE) -> tuple[Geometry, ModelWeights]:
    """Read one rank's weights of a checkpoint folder; raises CheckpointError or UnsupportedModelError."""
    geometry = load_geometry(path)
    return geometry, build_model(Checkpoint(path, geometry, dtype), geometry, shard)


class Checkpoint:
    """The tensors of a checkpoint folder by canonical name; implements ``TensorSource``."""

    def __init__(self, path: Path, geometry: Geometry, dtype: torch.dtype = torch.float32) -> None:
        """Open the folder's files; raises CheckpointError or UnsupportedModelError."""
        self.path, self.geometry, self.dtype = path, geometry, dtype
        self._shapes = expected_shapes(geometry)
        self._where: dict[str, tuple[Path, str]] = {}
        unknown = []
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{path}: no *.safetensors files")
        self._files = {file: safe_open(str(file), "pt") for file in files}
        for file, handle in self._files.items():
            for name in handle.keys():
                canonical = canonical_name(name)
                if canonical is not None:
                    self._where[canonical] = (file, name)
                elif not ignored(name):
                    unknown.append(name)
        if unknown:
            raise UnsupportedModelError(f"{path}: {len(unknown)} unknown tensors, such as {', '.join(unknown[:3])}")

    def tensor(self, name: str) -> Tensor:
        """The tensor of that canonical name; integers keep their type, small parameters are float32."""
        if name not in self._where:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        file, stored = self._where[name]
        tensor: Tensor = self._files[file].get_tensor(stored)
        return tensor.to(self._dtype_of(name)) if tensor.is_floating_point() else tensor

    def experts(self, layer: int, part: slice) -> tuple[Tensor, Tensor]:
        """Routed experts ``part``: (w1 over w3 [E, 2 * width, hidden], w2 [E, hidden, width])."""
        prefix = f"layers.{layer}.ffn.experts"
        if f"{prefix}.w13" in self._where:
            return self._fused(f"{prefix}.w13", part), self._fused(f"{prefix}.w2", part)
        width, hidden = self.geometry.expert_width, self.geometry.hidden_size
        count = part.stop - part.start
        w13 = torch.empty(count, 2 * width, hidden, dtype=self.dtype)
        w2 = torch.empty(count, hidden, width, dtype=self.dtype)
        for row, expert in enumerate(range(part.start, part.stop)):
            w13[row, :width] = self.tensor(f"{prefix}.{expert}.w1.weight")
            w13[row, width:] = self.tensor(f"{prefix}.{expert}.w3.weight")
            w2[row] = self.tensor(f"{prefix}.{expert}.w2.weight")
        return w13, w2

    def _fused(self, name: str, part: slice) -> Tensor:
        file, stored = self._where[name]
        tensor: Tensor = self._files[file].get_slice(stored)[part]
        return tensor.to(self.dtype)

    def _dtype_of(self, name: str) -> torch.dtype:
        matrix = len(self._shapes[name]) > 1 and not name.endswith((".ape", "_fn"))
        return self.dtype if matrix else torch.float32
