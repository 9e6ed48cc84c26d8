"""Altered copies of weight trees and models, for tests that must notice the alteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from redknot.model.weights import ModelWeights
from redknot.runtime.model import Model


def mapped(tree: Any, change: Callable[[str, Tensor], Tensor], prefix: str = "") -> Any:
    """The same tree with every tensor replaced by ``change(dotted path, tensor)``."""
    if isinstance(tree, Tensor):
        return change(prefix, tree)
    if isinstance(tree, tuple):
        return tuple(mapped(item, change, f"{prefix}.{index}") for index, item in enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts = {
            field.name: mapped(getattr(tree, field.name), change, f"{prefix}.{field.name}".lstrip("."))
            for field in dataclasses.fields(tree)
        }
        return dataclasses.replace(tree, **parts)
    return tree


def with_tensors(model: Model, part: str, change: Callable[[Tensor], Tensor]) -> Model:
    """A model whose tensors with a path that ends in ``part`` are changed; there must be some."""
    seen = []

    def one(name: str, tensor: Tensor) -> Tensor:
        if name != part and not name.endswith(f".{part}"):
            return tensor
        seen.append(name)
        return change(tensor.clone())

    weights: ModelWeights = mapped(model.weights, one)
    assert seen, f"no tensor called {part}"
    return Model(model.geometry, weights, model.group)


def with_geometry(model: Model, **changes: Any) -> Model:
    """A model of the same weights that believes in another geometry."""
    return Model(dataclasses.replace(model.geometry, **changes), model.weights, model.group)
