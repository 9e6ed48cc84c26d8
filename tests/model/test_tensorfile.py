"""Safetensors files read by hand: equal to the library's reading, and every damaged header refused in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from redknot.errors import CheckpointError
from redknot.model.tensorfile import BrokenFileError, read_header, read_table

TENSORS = {
    "a": torch.arange(24.0).view(4, 3, 2),
    "b": torch.arange(7, dtype=torch.int64),
    "c": torch.linspace(-3, 3, 8).to(torch.bfloat16).view(2, 4),
    "d": torch.linspace(-3, 3, 8).to(torch.float8_e4m3fn),
    "empty": torch.zeros(0, 5),
    "scalar": torch.tensor(4.5, dtype=torch.float16),
}


def raw(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_reads_what_the_library_reads(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    header = read_header(path)
    for name, expected in load_file(path).items():
        found = header[name].read()
        assert found.dtype == expected.dtype
        assert torch.equal(found.double(), expected.double())
        assert found.untyped_storage().nbytes() == header[name].nbytes
    assert header.keys() == TENSORS.keys()


def test_rows_only(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    found = read_header(path)["a"].read(slice(1, 3))
    assert torch.equal(found, TENSORS["a"][1:3])
    assert found.untyped_storage().nbytes() == 2 * 6 * 4
    assert read_header(path)["a"].read(slice(3, 3)).shape == (0, 3, 2)
    assert read_header(path)["empty"].read(slice(0, 0)).shape == (0, 5)


def test_packed_fp4_reads_as_bytes(tmp_path: Path) -> None:
    path, packed = tmp_path / "x.safetensors", torch.arange(32, dtype=torch.uint8).view(4, 8)
    save_file({"x": packed.view(torch.float4_e2m1fn_x2)}, path)
    header = read_header(path)
    assert (header["x"].dtype, header["x"].shape) == ("F4", (4, 16))
    assert torch.equal(header["x"].read(), packed)
    assert torch.equal(header["x"].read(slice(2, 4)), packed[2:])


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    save_file(TENSORS, whole)
    content = whole.read_bytes()
    for length in {0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 1}:
        cut.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"cut\.safetensors: (not a safetensors|truncated)"):
            read_header(cut)
    cut.write_bytes(content + b"x")
    with pytest.raises(CheckpointError, match="longer than it should be"):
        read_header(cut)


def test_damage_and_a_failing_disk_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    stored = read_table(path, 1000)["a"]
    with pytest.raises(BrokenFileError, match="header cap 100"):
        read_table(path, 100)
    path.write_bytes(b"")
    with pytest.raises(BrokenFileError, match="ended inside tensor a"):
        stored.load()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        stored.load()


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    header = read_header(path)
    path.write_bytes(path.read_bytes()[:-1])
    last = max(header.values(), key=lambda tensor: tensor.start)
    with pytest.raises(CheckpointError, match="file changed"):
        last.read()
    path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        header["a"].read()


@pytest.mark.parametrize(
    ("header", "size", "words"),
    [
        (b"{" * 5000, 0, "header is not understood"),
        (b"[]", 0, "header is not understood"),
        (b"\xff\xfe", 0, "header is not understood"),
        ({"x": 3}, 0, "header is not understood"),
        ({"x": {"dtype": "U8", "shape": [1]}}, 1, "header is not understood"),
        ({"x": entry(0, 4, shape=[-4])}, 4, "header is not understood"),
        ({"x": entry(0, 4, shape=[4.0])}, 4, "header is not understood"),
        ({"x": entry(0, 1, shape=[True])}, 1, "header is not understood"),
        ({"x": entry(4, 0, shape=[0])}, 4, "header is not understood"),
        ({"x": entry(0, 0, shape=[0, 1 << 62, 1 << 62])}, 0, "header is not understood"),
        ({"x": entry(0, 1, shape=[1] * 9)}, 1, "header is not understood"),
        ({"x": {**entry(0, 4), "pickle": "x"}}, 4, "header is not understood"),
        ({"x\ny": entry(0, 4)}, 4, "header is not understood"),
        (b'{"x":1,"x":1}', 0, "header is not understood"),
        ({"x": {**entry(0, 4), "data_offsets": [0, 4, 8]}}, 4, "header is not understood"),
        ({"x": entry(0, 4, "F32", [2])}, 4, r"tensor x has 4 bytes, which is not F32 \[2\]"),
        ({"x": entry(0, 4, "F32", [1 << 60])}, 4, "tensor x has 4 bytes"),
        ({"x": entry(0, 1, "F4", [1])}, 1, "tensor x has 1 bytes"),
        ({"x": entry(0, 4), "y": entry(2, 6)}, 6, "tensor y overlaps"),
        ({"x": entry(0, 4), "y": entry(6, 8)}, 8, "leaves a gap"),
        ({"x": entry(0, 1 << 50)}, 4, "truncated: .* calls for"),
    ],
)
def test_hostile_headers(tmp_path: Path, header: Any, size: int, words: str) -> None:
    path = raw(tmp_path / "x.safetensors", header, bytes(size))
    with pytest.raises(CheckpointError, match=words) as caught:
        read_header(path)
    assert "\n" not in str(caught.value)


def test_a_huge_header_length_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_header(path)


def test_unknown_dtypes_are_listed_for_others_to_refuse(tmp_path: Path) -> None:
    path = raw(tmp_path / "x.safetensors", {"x": entry(0, 3, "E3M2", [4])}, bytes(3))
    assert read_header(path)["x"].dtype == "E3M2"


def test_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.safetensors")
    with pytest.raises(CheckpointError, match="it is a FIFO, not a regular file"):
        read_header(tmp_path / "fifo.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path)
