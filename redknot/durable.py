"""What every file of ours is written and read with: whole or not at all, and there after a power cut. No torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_IOV_BATCH = 512  # buffers a writev call; below every platform's IOV_MAX


def write_all(descriptor: int, buffers: Sequence[bytes | memoryview]) -> None:
    """Write the buffers one behind the other and sync the file; OSError from the disk."""
    pending = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while pending:
        batch = pending[:_IOV_BATCH]
        written = os.writev(descriptor, batch)
        rest: list[memoryview] = []
        for buffer in batch:
            taken = min(written, len(buffer))
            written -= taken
            if taken < len(buffer):
                rest.append(buffer[taken:])
        pending = rest + pending[_IOV_BATCH:]
    os.fsync(descriptor)


def read_all(descriptor: int, into: memoryview, at: int) -> bool:
    """Fill ``into`` from offset ``at`` of a file; False when the file ends before. OSError from the disk."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], at + done)
        if count == 0:
            return False
        done += count
    return True


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable; OSError from the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
