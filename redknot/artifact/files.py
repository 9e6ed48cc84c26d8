"""Safetensors and plain files on disk: checked before anything is allocated, written so that a crash shows nothing.

Reading: the header length is checked against the file's size and a cap, then names, dtypes, shapes and
offsets are checked, and only then is the payload mapped. Writing is ours because the safetensors library
copies every tensor once more and reports disk errors without their errno; what is written is plain
safetensors, readable by that library.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from redknot.artifact.header import DTYPE_NAMES, DTYPES, HEADER_CAP, TensorEntry, build_header, parse_header
from redknot.artifact.reasons import MalformedFileError, describe_os_error
from redknot.durable import read_all, sync_folder, write_all
from redknot.errors import StoreError


@dataclass(frozen=True)
class WrittenTensor:
    """What was written for one tensor."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    checksum: str


def checksum(data: memoryview | bytes) -> str:
    """Return the tagged checksum of some bytes: it finds damage, it is no defence against an attacker."""
    return "xxh3-128:" + xxhash.xxh3_128_hexdigest(data)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's bytes without a copy."""
    flat = tensor.reshape(-1)
    return memoryview(b"") if flat.numel() == 0 else flat.view(torch.uint8).numpy().data


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, WrittenTensor]:
    """Write a new safetensors file, fsync it, and return what was written per tensor.

    Contiguous CPU tensors are written from where they are. StoreError for a dtype the format lacks;
    OSError from the disk, with the partial file left to the caller.
    """
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    specs: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in ready.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise StoreError(f"section {name} has dtype {tensor.dtype}; supported: {', '.join(DTYPES)}")
        specs[name] = (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
    header, order = build_header(specs)
    views = {name: byte_view(ready[name]) for name in order}
    write_new(path, [header, *views.values()])
    return {
        name: WrittenTensor(*specs[name], nbytes=len(views[name]), checksum=checksum(views[name])) for name in order
    }


def write_new(path: Path, buffers: list[bytes | memoryview]) -> None:
    """Create a file that must not exist, write the buffers and fsync it; OSError from the disk, naming the file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_all(descriptor, buffers)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a small file: written aside in the same directory, fsynced, renamed; OSError leaves the old one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        write_new(aside, [data])
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


class SafetensorsFile:
    """One safetensors file, checked when opened; tensors are read when asked for.

    With ``mapped`` a tensor is a view of a private mapping (treat it as read only; it stays valid after the file
    is unlinked, and no descriptor is kept). Without it every call reads into fresh memory, so that a failing
    disk is an OSError and never a SIGBUS.
    """

    def __init__(self, path: Path, *, mapped: bool = True) -> None:
        """Open and check a file; MalformedFileError for its content, OSError from the disk."""
        self.path = path
        self._pages: torch.Tensor | None = None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.signature = _signature(os.fstat(descriptor))
            size = self.signature[0]
            length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
            if size < 10 or length > min(HEADER_CAP, size - 8):
                raise MalformedFileError(
                    f"{path}: header of {length} bytes in {size}, cap {HEADER_CAP}: truncated or no safetensors"
                )
            text = os.pread(descriptor, length, 8)
            self._start = 8 + length
            try:
                self.entries = parse_header(text, size - self._start)
            except ValueError as error:
                raise MalformedFileError(f"{path}: {error}") from error
            if mapped:
                self._pages = _map(descriptor, path, size)
        finally:
            os.close(descriptor)

    def changed(self) -> bool:
        """Say whether the path now holds another file than the one opened, or none."""
        try:
            return _signature(os.stat(self.path)) != self.signature
        except FileNotFoundError:
            return True

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor; KeyError for an unknown name, OSError from the disk (unmapped files only)."""
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        if self._pages is None:
            raw = self._read(entry)
        else:
            raw = self._pages[self._start + entry.begin : self._start + entry.end]
            if raw.storage_offset() % dtype.itemsize:
                raw = raw.clone()
        return raw.view(dtype).view(entry.shape)

    def _read(self, entry: TensorEntry) -> torch.Tensor:
        raw = torch.empty(entry.nbytes, dtype=torch.uint8)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _signature(os.fstat(descriptor)) != self.signature:
                raise MalformedFileError(f"{self.path}: the file changed after it was opened")
            if not read_all(descriptor, raw.numpy().data, self._start + entry.begin):
                raise MalformedFileError(f"{self.path}: the file ends inside a tensor")
        finally:
            os.close(descriptor)
        return raw


def _signature(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _map(descriptor: int, path: Path, size: int) -> torch.Tensor:
    # /dev/fd maps the very file that was checked; the path could name another one by now.
    alias = f"/dev/fd/{descriptor}"
    source = alias if os.path.exists(alias) else str(path)
    try:
        return torch.from_file(source, shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise StoreError(f"cannot map {path} ({size} bytes): {error}") from error


def read_small(path: Path, cap: int = HEADER_CAP) -> bytes:
    """Return a small file's bytes; MalformedFileError above ``cap`` bytes, OSError from the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        if size > cap:
            raise MalformedFileError(f"{path} has {size} bytes, at most {cap} are read")
        return handle.read(size + 1)


def store_error(action: str, path: Path, error: OSError) -> StoreError:
    """Return the StoreError of a failed disk operation, with file, errno and reason."""
    return StoreError(describe_os_error(action, path, error))
