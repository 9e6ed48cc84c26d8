"""Recount the disk tier from its files alone, without a model: every block is read, nothing is changed.

A block's file says itself what it is for and what its checksum is; the layout is the name of the folder it lies in.
Imports no torch.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from redknot.errors import StoreError
from redknot.latents.disk import BLOCK_FILE
from redknot.latents.diskfile import PREFIX_BYTES, DamagedFileError, folder_bytes, read_block


@dataclass(frozen=True)
class LayoutCheck:
    """The blocks of one layout."""

    layout: str  # name of its folder
    blocks: int  # whole ones
    live: int  # bytes of all files of blocks, damaged ones too: they count until they are found out
    quarantined: int  # bytes
    unfinished: int  # files being written, or left by a process that died
    damaged: tuple[str, ...]  # one line each


def check_folder(folder: Path, on_file: Callable[[], object] = lambda: None) -> list[LayoutCheck]:
    """Check every layout below the folder of a disk tier; StoreError when it cannot be read."""
    try:
        return [_check_layout(path, on_file) for path in sorted(folder.iterdir()) if (path / "blocks").is_dir()]
    except OSError as error:
        raise StoreError(f"cannot read {error.filename or folder}: errno {error.errno} ({error.strerror})") from error


def _check_layout(root: Path, on_file: Callable[[], object]) -> LayoutCheck:
    whole, live, damaged = 0, 0, []
    for path in sorted((root / "blocks").iterdir()):
        try:
            live += path.lstat().st_size
            problem = _problem(path)
        except FileNotFoundError:
            continue  # removed by another process
        on_file()
        if problem:
            damaged.append(problem)
        else:
            whole += 1
    unfinished = len(os.listdir(root / "aside"))
    return LayoutCheck(root.name, whole, live, folder_bytes(root / "quarantine"), unfinished, tuple(damaged))


def _problem(path: Path) -> str:
    """What is wrong with a file that lies where blocks do, "" when it is one."""
    match, found = BLOCK_FILE.fullmatch(path.name), path.lstat()
    if match is None or not stat.S_ISREG(found.st_mode):
        return f"{path} is no file of a block"
    if found.st_size <= PREFIX_BYTES:
        return f"{path} has {found.st_size} bytes, too few for a block"
    try:
        read_block(str(path), bytes.fromhex(match.group(1)), memoryview(bytearray(found.st_size - PREFIX_BYTES)))
    except DamagedFileError as error:
        return str(error)
    with suppress(OSError):  # the time orders evictions, and nobody used the block
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    return ""
