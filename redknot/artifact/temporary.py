"""Directories being written or thrown away: below tmp/, named after the process that owns them."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from redknot.artifact.schema import TEMPORARY_DIR

_TRASH = "trash-"


def make_temporary(root: Path) -> Path:
    """Make a directory that belongs to this process; OSError from the disk."""
    parent = root / TEMPORARY_DIR
    if not parent.is_dir():
        parent.mkdir(exist_ok=True)
    path = parent / f"{_host()}.{os.getpid()}.{_start_time(os.getpid())}.{secrets.token_hex(6)}"
    path.mkdir()
    return path


def move_to_trash(root: Path, path: Path) -> Path:
    """Take a directory out of objects/ in one step; the caller deletes what is returned. OSError from the disk."""
    parent = root / TEMPORARY_DIR
    if not parent.is_dir():
        parent.mkdir(exist_ok=True)
    trash = parent / (_TRASH + secrets.token_hex(8))
    os.rename(path, trash)
    return trash


def delete_tree(path: Path) -> None:
    """Delete a directory as far as possible; what stays is found by the next gc."""
    shutil.rmtree(path, ignore_errors=True)


def directory_bytes(path: Path) -> int:
    """Return the bytes of all files below a directory; what vanishes meanwhile counts as nothing."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def is_abandoned(path: Path, max_age_s: float) -> bool:
    """Say whether nobody will finish a directory below tmp/.

    True for trash, for a directory whose process is gone from this machine, and for one that is older than
    ``max_age_s`` seconds (its process may be on another machine).
    """
    if path.name.startswith(_TRASH):
        return True
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:
        return False
    parts = path.name.split(".")
    if len(parts) == 4 and parts[0] == _host() and parts[1].isdigit():
        return not _is_running(int(parts[1]), parts[2])
    return age > max_age_s


def _is_running(pid: int, start_time: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return _start_time(pid) == start_time


def _start_time(pid: int) -> str:
    """Ticks from boot to the start of a process: tells it from a later one with the same pid; 0 where unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "0"
    return stat.rpartition(")")[2].split()[19]


def _host() -> str:
    """Name this machine, boot and pid namespace: pids mean the same only where this is equal."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        parts.append("no /proc")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
