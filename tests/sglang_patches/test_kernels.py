"""The stand-in for sgl_kernel beats an installed package, has its constants, and computes nothing."""

from __future__ import annotations

from pathlib import Path

from tests.kit import child

_BROKEN = "raise ImportError('libcuda.so.1: cannot open shared object file')"


def installed(folder: Path) -> Path:
    """A package that cannot be imported here, and its one module that could be."""
    package = folder / "sgl_kernel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_BROKEN)
    (package / "elementwise.py").write_text(_BROKEN)
    (package / "scalar_type.py").write_text("float4 = 'constant'")
    return folder


def ran(source: str, folder: Path) -> list[str]:
    done = child.python(f"import sys; sys.path.insert(0, {str(folder)!r})\n{source}")
    assert done.code == 0, done.err
    return done.out.splitlines()


def test_it_comes_before_an_installed_package(tmp_path):
    source = """
from sglang_patches import kernels
kernels.install(); kernels.install()
print(sum("sglang_patches" in repr(finder) for finder in sys.meta_path))
import sgl_kernel, sgl_kernel.elementwise
from sgl_kernel import rmsnorm, flash_attn
from sgl_kernel.quantization.gguf import ggml_dequantize
from sgl_kernel.scalar_type import float4
print(float4)
for call in (rmsnorm, sgl_kernel.elementwise.silu, ggml_dequantize):
    try:
        call(1, two=2)
    except RuntimeError as error:
        print(error)
print(hasattr(sgl_kernel, "__version__"))
"""
    assert ran(source, installed(tmp_path)) == [
        "1",
        "constant",
        "sgl_kernel.rmsnorm needs a GPU; this process runs on the CPU",
        "sgl_kernel.elementwise.silu needs a GPU; this process runs on the CPU",
        "sgl_kernel.quantization.gguf.ggml_dequantize needs a GPU; this process runs on the CPU",
        "False",
    ]


def test_other_names_are_not_its_business(tmp_path):
    source = """
from sglang_patches import kernels
kernels.install()
for name in ("sgl_kernels", "sgl_kernel_other", "flash_attn_nowhere"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        print(error.name)
"""
    assert ran(source, installed(tmp_path)) == ["sgl_kernels", "sgl_kernel_other", "flash_attn_nowhere"]


def test_without_the_stand_in_the_installed_package_is_imported(tmp_path):
    source = """
import sglang_patches.kernels
try:
    import sgl_kernel
except ImportError as error:
    print(error)
"""
    assert ran(source, installed(tmp_path)) == ["libcuda.so.1: cannot open shared object file"]


def test_the_real_constants_of_the_installed_package():
    source = """
from sglang_patches import kernels
kernels.install()
from sgl_kernel.scalar_type import scalar_types
print(type(scalar_types.uint4b8).__module__, scalar_types.uint4b8.size_bits)
"""
    assert child.python(source).out == "sgl_kernel.scalar_type 4\n"
