"""Files of strangers are refused before anything is allocated; ours survive every crash."""

import errno
import json
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redknot.artifact.files import (
    byte_view,
    checksum,
    read_section,
    read_sections_table,
    read_small,
    write_atomic,
    write_safetensors,
)
from redknot.artifact.header import DTYPES, HEADER_CAP
from redknot.artifact.reasons import MalformedFileError
from redknot.errors import StoreError
from tests.artifact.kit import Steps

SPECS = st.dictionaries(
    st.from_regex(r"[a-z]{1,5}(\.[0-9]{1,2})?", fullmatch=True),
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3)),
    max_size=6,
)


def make(specs: dict) -> dict[str, torch.Tensor]:
    made = {}
    for name, (dtype, shape) in specs.items():
        count = DTYPES[dtype].itemsize
        for size in shape:
            count *= size
        raw = torch.randint(0, 2, (count,), dtype=torch.uint8)
        made[name] = raw.view(DTYPES[dtype]).view(shape) if count else torch.empty(shape, dtype=DTYPES[dtype])
    return made


def opened(path: Path, name: str) -> torch.Tensor:
    return read_section(read_sections_table(path)[name])


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and byte_view(left) == byte_view(right)


@given(SPECS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read_and_is_safetensors(tmp_path: Path, specs: dict) -> None:
    path = tmp_path / "x.safetensors"
    path.unlink(missing_ok=True)
    tensors = make(specs)
    written = write_safetensors(path, tensors)
    assert written.keys() == tensors.keys()
    library = safetensors.torch.load_file(path)
    table = read_sections_table(path)
    assert table.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same(read_section(table[name]), tensor)
        assert same(library[name], tensor)
        assert written[name].nbytes == table[name].nbytes
        assert written[name].checksum == checksum(byte_view(tensor))


def test_the_library_s_files_are_read(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 5), "a": torch.arange(7, dtype=torch.uint8), "c": torch.randn(2).bfloat16()}
    safetensors.torch.save_file(tensors, tmp_path / "x", metadata={"format": "pt"})
    assert all(same(opened(tmp_path / "x", name), tensor) for name, tensor in tensors.items())


def test_a_misaligned_tensor_is_read(tmp_path: Path) -> None:
    write_raw(tmp_path / "x", {"a": entry("U8", [3], 0, 3), "b": entry("F32", [1], 3, 7)}, b"\1\2\3\0\0\x80\x3f")
    assert opened(tmp_path / "x", "b").item() == 1.0


def test_strided_tensors_and_long_lists(tmp_path: Path) -> None:
    base = torch.randn(40, 30)
    tensors = {f"t.{i}": base[:, i % 30] for i in range(700)}
    write_safetensors(tmp_path / "x", tensors)
    assert all(torch.equal(opened(tmp_path / "x", name), tensor) for name, tensor in tensors.items())


def test_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"section z has dtype torch\.complex64"):
        write_safetensors(tmp_path / "x", {"z": torch.zeros(1, dtype=torch.complex64)})


def entry(dtype: str, shape: list, begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_raw(path: Path, header: object, payload: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + payload)


GOOD = entry("F32", [2], 0, 8)
HOSTILE: dict[str, tuple[object, bytes]] = {
    "not json": (b"{", b""),
    "not utf-8": (b'{"\xff": 1}', b""),
    "not an object": ([], b""),
    "deep": (b'{"a":' + b"[" * 100_000, b""),
    "huge number": (b'{"a":' + b"9" * 10_000 + b"}", b""),
    "path": ({"../../x": GOOD}, bytes(8)),
    "absolute": ({"/etc/x": GOOD}, bytes(8)),
    "dots": ({"a..b": GOOD}, bytes(8)),
    "nul": ({"a\0b": GOOD}, bytes(8)),
    "long name": ({"a" * 300: GOOD}, bytes(8)),
    "twice": (b'{"a":' + json.dumps(GOOD).encode() + b',"a":' + json.dumps(GOOD).encode() + b"}", bytes(8)),
    "overlap": ({"a": GOOD, "b": entry("F32", [2], 4, 12)}, bytes(12)),
    "same place": ({"a": GOOD, "b": GOOD}, bytes(8)),
    "gap": ({"a": GOOD, "b": entry("F32", [1], 12, 16)}, bytes(16)),
    "not from zero": ({"a": entry("F32", [1], 4, 8)}, bytes(8)),
    "outside": ({"a": entry("F32", [200], 0, 800)}, bytes(8)),
    "payload left over": ({"a": GOOD}, bytes(9)),
    "reversed": ({"a": entry("F32", [2], 8, 0)}, bytes(8)),
    "negative": ({"a": entry("F32", [2], -8, 0)}, bytes(8)),
    "negative shape": ({"a": entry("F32", [-2, -1], 0, 8)}, bytes(8)),
    "wrong shape": ({"a": entry("F32", [3], 0, 8)}, bytes(8)),
    "absurd empty shape": ({"a": entry("F32", [0, 2**62, 2**62], 0, 0)}, b""),
    "many axes": ({"a": entry("F32", [1] * 9, 0, 4)}, bytes(4)),
    "boolean shape": ({"a": entry("F32", [True], 0, 4)}, bytes(4)),
    "float offset": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]}}, bytes(8)),
    "unknown dtype": ({"a": entry("F7", [8], 0, 8)}, bytes(8)),
    "dtype of another type": ({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "extra key": ({"a": GOOD | {"pickle": "x"}}, bytes(8)),
    "missing key": ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "entry is a list": ({"a": [0, 8]}, bytes(8)),
}


@pytest.fixture
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a payload would be read."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("allocated for a hostile file")

    monkeypatch.setattr(os, "preadv", refuse)
    monkeypatch.setattr(torch, "empty", refuse)


@pytest.mark.usefixtures("no_allocation")
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(tmp_path: Path, case: str) -> None:
    header, payload = HOSTILE[case]
    write_raw(tmp_path / "x", header, payload)
    with pytest.raises(MalformedFileError, match=str(tmp_path / "x")):
        read_sections_table(tmp_path / "x")


@pytest.mark.usefixtures("no_allocation")
@pytest.mark.parametrize("length", [2**64 - 1, 2**63, HEADER_CAP + 1, 3, 10**9])
def test_absurd_header_lengths(tmp_path: Path, length: int) -> None:
    write_raw(tmp_path / "x", b"{}", b"", length)
    with pytest.raises(MalformedFileError, match="header of"):
        read_sections_table(tmp_path / "x")


@pytest.mark.usefixtures("no_allocation")
def test_a_header_above_the_cap_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as handle:
        handle.write((HEADER_CAP + 8).to_bytes(8, "little"))
        handle.truncate(2 * HEADER_CAP)
    with pytest.raises(MalformedFileError, match="cap"):
        read_sections_table(tmp_path / "x")


@pytest.mark.usefixtures("no_allocation")
@pytest.mark.parametrize("data", [b"", b"\0", bytes(9), pickle.dumps({"a": 1}), bytes(4096)])
def test_files_that_are_something_else(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(MalformedFileError):
        read_sections_table(tmp_path / "x")


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_refused_or_consistent(tmp_path: Path, text: bytes) -> None:
    write_raw(tmp_path / "x", text)
    try:
        table = read_sections_table(tmp_path / "x")
    except MalformedFileError:
        return
    assert all(found.nbytes == 0 for found in table.values())


def test_truncation_at_every_page(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_safetensors(path, {"a": torch.randn(9, 1024), "b": torch.randn(100)})
    whole = path.read_bytes()
    for size in {*range(0, len(whole), 4096), len(whole) - 1}:
        path.write_bytes(whole[:size])
        with pytest.raises(MalformedFileError):
            read_sections_table(path)


def test_writing_to_a_section_does_not_reach_the_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x", {"a": torch.ones(10)})
    opened(tmp_path / "x", "a").zero_()
    assert torch.equal(opened(tmp_path / "x", "a"), torch.ones(10))


def test_a_file_that_shrinks_or_grows_between_two_reads(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x", {"a": torch.ones(1000)})
    table = read_sections_table(tmp_path / "x")
    for size in (2000, 100, 0):
        os.truncate(tmp_path / "x", size)
        with pytest.raises(MalformedFileError, match="ended inside tensor a"):
            read_section(table["a"])
    (tmp_path / "x").unlink()
    with pytest.raises(FileNotFoundError):
        read_section(table["a"])


def test_partial_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_safetensors(tmp_path / "x", {"a": torch.arange(1000.0)})
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:7]], at))
    assert torch.equal(opened(tmp_path / "x", "a"), torch.arange(1000.0))


NO_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "fifo": (os.mkfifo, "a FIFO"),
    "directory": (os.mkdir, "a directory"),
    "socket": (lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), "a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_regular_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    """A FIFO would hold up whoever opens it, /dev/zero never ends."""
    make_it, name = NO_FILES[kind]
    make_it(tmp_path / "x")
    for read in (read_sections_table, read_small):
        with pytest.raises(MalformedFileError, match=f"x: cannot be read .it is {name}"):
            read(tmp_path / "x")


def test_a_fifo_that_takes_the_place_of_a_file_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(b"x")
    before = os.stat(tmp_path / "x")
    (tmp_path / "x").unlink()
    os.mkfifo(tmp_path / "x")
    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda *_, **__: before)
        with pytest.raises(MalformedFileError, match="it is a FIFO"):
            read_small(tmp_path / "x")
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_partial_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, buffers: real(fd, [buffers[0][:7]]))
    value = torch.arange(30, dtype=torch.uint8)
    write_safetensors(tmp_path / "x", {"a": value, "b": value + 1})
    assert torch.equal(opened(tmp_path / "x", "b"), value + 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_an_atomic_write_leaves_the_old_file(tmp_path: Path, number: int) -> None:
    path = tmp_path / "x.json"
    write_atomic(path, b"old")

    def fail(_: str) -> None:
        raise OSError(number, os.strerror(number))

    calls = ("open", "writev", "fsync", "replace")
    for at in range(len(calls)):
        with pytest.MonkeyPatch.context() as patch:
            Steps(at, fail).install(patch, calls)
            with pytest.raises(OSError, match=os.strerror(number)):
                write_atomic(path, b"new")
        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["x.json"]
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def test_small_files_have_a_cap(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(101))
    assert len(read_small(tmp_path / "x", 101)) == 101
    with pytest.raises(MalformedFileError, match="at most 100"):
        read_small(tmp_path / "x", 100)
