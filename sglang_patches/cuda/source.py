"""What a package's source says of its classes, functions and constants, read without importing it.

SGLang's modules for DeepSeek-V4 import kernels that need a GPU's libraries, and importing any of SGLang takes seconds
and chooses its platform. Its text can be looked at on any machine, before anything of it runs.
"""

from __future__ import annotations

import ast
import hashlib
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def package_folder(package: str) -> Path | None:
    """Where a top-level package lies; None where it is not installed. It is not imported."""
    spec = find_spec(package)
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else None


def short_digest(content: bytes) -> str:
    """Twelve hexadecimal digits of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:12]


@lru_cache(maxsize=64)
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


class Source:
    """The modules of one package, by dotted names below it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def parameters(self, module: str, name: str) -> str | None:
        """Parameters of a function or ``Class.method`` as one line (=: by keyword only); None where there is none."""
        found = self._find(module, name)
        if not isinstance(found, _Function):
            return None
        given = found.args
        words = [one.arg for one in (*given.posonlyargs, *given.args)]
        words += [f"*{given.vararg.arg}"] if given.vararg else []
        words += [f"={one.arg}" for one in given.kwonlyargs]
        words += [f"**{given.kwarg.arg}"] if given.kwarg else []
        return " ".join(words)

    def bases(self, module: str, name: str) -> str | None:
        """Base classes of a class as one line; None where there is no such class."""
        found = self._find(module, name)
        return " ".join(ast.unparse(base) for base in found.bases) if isinstance(found, ast.ClassDef) else None

    def value(self, module: str, name: str) -> str | None:
        """The expression that a name of a module, or ``Class.name`` of a class, is set to; None where it is not."""
        place, _, last = name.rpartition(".")
        body = self._body(module, place)
        for node in body or ():
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            named = any(isinstance(target, ast.Name) and target.id == last for target in targets)
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and named:
                return ast.unparse(node.value)
        return None

    def attributes(self, module: str, name: str) -> frozenset[str]:
        """Attributes of ``self`` that the methods of a class set."""
        found = self._find(module, name)
        nodes = ast.walk(found) if isinstance(found, ast.ClassDef) else ()
        return frozenset(
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        )

    def text(self, module: str, name: str) -> str | None:
        """A function or class exactly as it is written; None where there is none."""
        found = self._find(module, name)
        return None if found is None else ast.get_source_segment(self._read(module) or "", found)

    def digest(self, path: str) -> str | None:
        """Of a file by its path in the package: twelve digits of its SHA-256; None where there is none."""
        place = self._folder / path
        return short_digest(place.read_bytes()) if place.is_file() else None

    def _find(self, module: str, name: str) -> _Function | ast.ClassDef | None:
        place, _, last = name.rpartition(".")
        for node in self._body(module, place) or ():
            if isinstance(node, _Function | ast.ClassDef) and node.name == last:
                return node
        return None

    def _body(self, module: str, place: str) -> list[ast.stmt] | None:
        text = self._read(module)
        tree = None if text is None else _tree(text)
        if not place:
            return None if tree is None else tree.body
        found = self._find(module, place)
        return found.body if isinstance(found, ast.ClassDef) else None

    def _read(self, module: str) -> str | None:
        path = self._path(module)
        return None if path is None else path.read_text(encoding="utf-8")

    def _path(self, module: str) -> Path | None:
        base = self._folder.joinpath(*module.split("."))
        return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)
