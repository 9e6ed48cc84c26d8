"""Safetensors and plain files on disk: checked before anything is allocated, written so that a crash shows nothing.

Writing is ours because the safetensors library copies every tensor once more and reports disk errors without their
errno; what is written is plain safetensors, readable by that library.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from redknot.artifact.header import DTYPE_NAMES, DTYPES, HEADER_CAP, TensorSpec, build_header
from redknot.artifact.reasons import MalformedFileError, describe_os_error
from redknot.durable import sync_folder, write_all
from redknot.errors import StoreError
from redknot.model.tensorfile import BrokenFileError, StoredTensor, open_regular, read_table

_NAME = re.compile(r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*")


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
    specs: dict[str, TensorSpec] = {}
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


def read_sections_table(path: Path) -> dict[str, StoredTensor]:
    """Return where each tensor of one of our files lies; MalformedFileError for its content, OSError from the disk."""
    with _malformed():
        table = read_table(path, HEADER_CAP)
    for name, tensor in table.items():
        if len(name) > 200 or _NAME.fullmatch(name) is None:
            raise MalformedFileError(f"{path}: {name[:80]!r} is not a tensor name")
        if tensor.dtype not in DTYPES:
            raise MalformedFileError(f"{path}: {name} has unknown dtype {tensor.dtype[:20]!r}")
    return table


def read_section(tensor: StoredTensor) -> torch.Tensor:
    """Read a tensor into memory of its own; MalformedFileError when the file shrank, OSError from the disk."""
    with _malformed():
        return tensor.load()


def read_small(path: Path, cap: int = HEADER_CAP) -> bytes:
    """Return a small file's bytes; MalformedFileError above ``cap`` bytes or for no file, OSError from the disk."""
    with _malformed():
        descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        if size > cap:
            raise MalformedFileError(f"{path} has {size} bytes, at most {cap} are read")
        return handle.read(size + 1)


@contextmanager
def _malformed() -> Iterator[None]:
    try:
        yield
    except BrokenFileError as error:
        raise MalformedFileError(str(error)) from error


def store_error(action: str, path: Path, error: OSError) -> StoreError:
    """Return the StoreError of a failed disk operation, with file, errno and reason."""
    return StoreError(describe_os_error(action, path, error))
