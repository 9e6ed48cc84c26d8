"""SGLang's own references, taken from its text: importing it would need more than a CPU."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from sglang_patches.cuda.source import Source

_NPU = "srt.hardware_backend.npu.attention.ascend_dsv4_backend"
_HEAD = """from __future__ import annotations
import math
import torch
"""
_PARTS = (("", _NPU, "_walsh_hadamard_matrix"),)


def load(source: Source, folder: Path) -> ModuleType:
    """A module of these functions, written into ``folder``."""
    texts = []
    for decorator, module, name in _PARTS:
        text = source.text(module, name)
        assert text is not None, name
        first, *rest = text.splitlines()  # a method's other lines are indented as it was
        shift = 4 if "." in name else 0
        texts.append("\n".join([decorator, first, *(line[shift:] for line in rest)]))
    path = folder / "sglang_reference.py"
    path.write_text(_HEAD + "\n\n".join(texts) + "\n_walsh_hadamard_matrix._cache = {}\n")
    spec = spec_from_file_location("sglang_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
