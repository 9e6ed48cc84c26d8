"""Files out of the page cache, so that what is read next comes from the disk."""

from __future__ import annotations

import os
from pathlib import Path


def drop_from_cache(folder: Path) -> None:
    """Ask the system to forget the pages of every file, so that the next read goes to the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
