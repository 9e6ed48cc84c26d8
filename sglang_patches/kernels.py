"""A stand-in for ``sgl_kernel`` on a machine whose libraries it cannot load.

SGLang imports the package at many places and uses almost nothing of it on a CPU; the installed one ends the import
without ``libcuda``. Names of the stand-in exist, and raise when they are called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_NAME = "sgl_kernel"


def install() -> None:
    """Put the stand-in in front of an installed package, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == f"{_NAME}.scalar_type":
            return _real_scalar_type(name)
        if name == _NAME or name.startswith(f"{_NAME}."):
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
        return None


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> None:
            raise RuntimeError(f"{self.__name__}.{name} needs a GPU; this process runs on the CPU")

        return missing


def _real_scalar_type(name: str) -> importlib.machinery.ModuleSpec | None:
    """The one module that is plain Python, and that others read constants from."""
    for folder in sys.path:
        path = Path(folder or ".") / _NAME / "scalar_type.py"
        if path.is_file():
            return importlib.util.spec_from_file_location(name, path)
    return None
