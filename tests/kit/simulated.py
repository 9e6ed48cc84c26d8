"""A device that is none: tensors hold their numbers in host memory and say that they lie elsewhere.

What torch would refuse on a GPU is refused here (host and device tensors in one operation), and inside ``no_waiting``
everything that would make the host wait for the device. Kernels are stood in for by their references, on the host's
numbers. The device is called "meta", which is the only one that every build of torch can speak of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
PINS = ("pin_memory", "_pin_memory")
COMPOSITE = "CompositeImplicitAutograd"
# What asks the device for a number, or for how large its result is.
WAITS = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}


class WouldWaitError(Exception):
    """The host would wait for the device."""


class OnDevice(Tensor):
    """A tensor that says it lies on the device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        with torch.inference_mode(False):  # views of memory that was taken outside of it are made inside
            made: OnDevice = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=DEVICE
            )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a tensor of the simulated device outside of it")


def inner(value: Any) -> Any:
    """The host's numbers of a tensor."""
    return value.inner if isinstance(value, OnDevice) else value


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel's stand-in: the host runs ``function`` on the numbers of device tensors, and puts back what comes."""

    def launched(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            found = function(*tree_map(_inside, args), **tree_map(_inside, kwargs))
        return _outside(found)

    return launched


def _inside(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: tree_map(_inside, getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return inner(value)


def _outside(value: Any) -> Any:
    if isinstance(value, Tensor):
        return OnDevice(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _outside(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return tuple(map(_outside, value)) if isinstance(value, tuple) else value


class Simulation(TorchDispatchMode):
    """The device while this is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting_allowed = True
        self.pinned: set[int] = set()
        self.copies = 0  # from the host to the device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        if name not in PINS and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE):
            with self:  # its parts may wait
                return func.decompose(*args, **kwargs)
        given, _ = tree_flatten((args, kwargs))
        tensors = [value for value in given if isinstance(value, Tensor)]
        here = [value for value in tensors if isinstance(value, OnDevice)]
        if name == "is_pinned":
            return args[0].data_ptr() in self.pinned
        if name in PINS:
            pinned = args[0].clone()
            self.pinned.add(pinned.data_ptr())
            return pinned
        target = kwargs.get("device")
        if here:
            self._check(name, func, args, here, tensors, target)
        elif target is not None and torch.device(target) == DEVICE and tensors:
            self._check_pinned(args[0], kwargs.get("non_blocking", False))
        elsewhere = bool(here) if target is None else torch.device(target) == DEVICE
        if target is not None:
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        found = func(*tree_map(inner, args), **tree_map(inner, kwargs))
        by_inner = {id(value.inner): value for value in here}

        def out(value: Any) -> Any:
            if not isinstance(value, Tensor) or not elsewhere:
                return value.clone() if isinstance(value, Tensor) and here and not elsewhere else value
            return by_inner[id(value)] if id(value) in by_inner else OnDevice(value)

        return tree_map(out, found)

    def _check(self, name: str, func: Any, args: Any, here: list[Any], tensors: list[Any], target: Any) -> None:
        """Refuse what a GPU refuses, and what waits where nothing may."""
        if target is None:
            mixed = [value for value in tensors if not isinstance(value, OnDevice) and value.dim()]
            assert not mixed, f"{func} of host and device tensors"
        masks = name in ("index", "index_put_", "index_put", "_index_put_impl_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        down = target is not None and torch.device(target) != DEVICE
        if (name in WAITS or masks or down) and not self.waiting_allowed:
            self.refuse(f"{func} waits for the device")

    def _check_pinned(self, tensor: Tensor, non_blocking: bool) -> None:
        self.copies += 1
        if not self.waiting_allowed and tensor.numel() and not (non_blocking and tensor.data_ptr() in self.pinned):
            self.refuse("a copy from memory that is not pinned waits")

    def refuse(self, what: str) -> None:
        """Called where the host would wait and may not."""
        raise WouldWaitError(what)

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Nothing in here may wait for the device."""
        self.waiting_allowed = False
        try:
            yield
        finally:
            self.waiting_allowed = True


@contextmanager
def simulated() -> Iterator[Simulation]:
    """The device for whoever runs in here, on this thread."""
    with Simulation() as simulation:
        yield simulation
