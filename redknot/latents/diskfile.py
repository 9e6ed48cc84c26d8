"""The file of one block, and what is done to folders: written aside and renamed, checked before and while it is read.

A file is a prefix of fixed length and the payload. The prefix holds the address of the name it is for, so that a file
under another's name is found out, and a checksum over all else. Nothing in it is interpreted but numbers.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import struct
from contextlib import suppress
from pathlib import Path

from redknot.durable import read_all, write_all
from redknot.errors import StoreError
from redknot.latents.content import ADDRESS_BYTES

_MAGIC = b"RKBLOCK1"
_FIELDS = struct.Struct(f"<8s{ADDRESS_BYTES}sQd")  # magic, address, bytes of payload, cost
_CHECKSUM_BYTES = 16
PREFIX_BYTES = _FIELDS.size + _CHECKSUM_BYTES
_ASIDE_TRIES = 8


class DamagedFileError(StoreError):
    """A block's file that is not what was written there."""


def write_block(path: str, aside: Path, where: bytes, payload: memoryview, cost: float) -> None:
    """Write a block to a new file below ``aside``, sync it and rename it to ``path``; OSError leaves nothing behind."""
    head = _FIELDS.pack(_MAGIC, where, len(payload), cost)
    temporary, descriptor = _create(aside)
    try:
        write_all(descriptor, [head, _checksum(head, payload), payload])
        os.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)


def read_block(path: str, where: bytes, into: memoryview) -> float:
    """Fill ``into`` with the payload of a block's file and return its cost.

    Kind and size of the file are checked before anything is read. DamagedFileError for what is not the block of
    ``where``, whole; FileNotFoundError where there is none; OSError from the disk. Then ``into`` holds anything.
    """
    # A link is no file of ours, and opening a pipe must not wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != PREFIX_BYTES + len(into):
            raise DamagedFileError(f"{path} is no file of {PREFIX_BYTES + len(into)} bytes")
        prefix = bytearray(PREFIX_BYTES)
        _fill(descriptor, memoryview(prefix), 0, path)
        head, checksum = bytes(prefix[: _FIELDS.size]), bytes(prefix[_FIELDS.size :])
        magic, address, nbytes, cost = _FIELDS.unpack(head)
        if (magic, address, nbytes) != (_MAGIC, where, len(into)):
            raise DamagedFileError(f"{path} is not the file of this block")
        _fill(descriptor, into, PREFIX_BYTES, path)
        if _checksum(head, into) != checksum:
            raise DamagedFileError(f"{path} has another checksum than it was written with")
        with suppress(OSError):  # the time only orders evictions
            os.utime(descriptor)
        return float(cost)
    finally:
        os.close(descriptor)


def remove_left_over(path: Path) -> bool:
    """Remove a file that ``write_block`` did not finish, if its writer is dead: a living one holds its lock."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner can enter; StoreError when it cannot be made, or is another user's."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        if found.st_uid != os.geteuid():
            raise StoreError(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}; it must be ours")
        if found.st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise StoreError(f"cannot use folder {path}: errno {error.errno} ({error.strerror})") from error
    return path


def _create(aside: Path) -> tuple[Path, int]:
    """A new file that is locked before anybody can take it for left over."""
    for _ in range(_ASIDE_TRIES):
        path = aside / secrets.token_hex(16)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return path, descriptor
        except BlockingIOError:
            pass  # somebody who cleans up was faster, and removes it
        except BaseException:
            os.close(descriptor)
            with suppress(OSError):
                os.unlink(path)
            raise
        os.close(descriptor)
    raise BlockingIOError(f"cannot lock a new file in {aside}")


def _fill(descriptor: int, into: memoryview, at: int, path: str) -> None:
    if not read_all(descriptor, into, at):
        raise DamagedFileError(f"{path} ends early")


def _checksum(head: bytes, payload: memoryview) -> bytes:
    import xxhash  # late: a store without a disk tier does without

    digest = xxhash.xxh3_128(head)
    digest.update(payload)
    return digest.digest()


def folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder; what vanishes meanwhile counts as nothing."""
    total = 0
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            total += os.lstat(folder / name).st_size
    return total


def bounded_folder(folder: Path, most: int) -> int:
    """Bytes of what is in a folder, once what goes beyond ``most`` is deleted: others may have put it there."""
    total = 0
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            size = os.lstat(folder / name).st_size
            if total + size <= most or not removed(folder / name):
                total += size
    return total


def removed(path: Path) -> bool:
    """Delete a file, or a folder that is empty; whether that was done."""
    for remove in (os.unlink, os.rmdir):
        with suppress(OSError):
            remove(path)
            return True
    return False
