"""Hash a checkpoint's weights once: SHA-256 per file, cached by (path, size, mtime, inode).

A start of a 160 GB model reads only the cache; ``verify=True`` reads the files again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redknot.artifact.files import read_small, write_atomic
from redknot.artifact.identity import tagged_hash
from redknot.artifact.reasons import describe_os_error
from redknot.errors import CheckpointError, StoreError
from redknot.model.checkpoint import weight_files
from redknot.model.tensorfile import BrokenFileError, open_regular

_CACHE_VERSION = 1
_HASH_THREADS = 4
# A file written again within one tick of the filesystem's clock keeps its mtime; such a hash is not cached.
_SETTLE_NS = 20_000_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _FileKey:
    path: str
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> _FileKey:
        resolved = path.resolve()
        stat = resolved.stat()
        return cls(str(resolved), stat.st_size, stat.st_mtime_ns, stat.st_ino)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 (hex) of one file; CheckpointError when it cannot be read."""
    try:
        with os.fdopen(open_regular(path), "rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(describe_os_error("read", path, error)) from error
    except BrokenFileError as error:
        raise CheckpointError(str(error)) from error


def weights_identity(checkpoint_dir: Path, cache_path: Path, *, verify: bool = False) -> str:
    """Return the hash over sorted (file name, SHA-256) of the weight files that a checkpoint loads.

    Files whose path, size, mtime and inode are in the cache are not read unless ``verify``. A damaged cache
    is rebuilt; one that cannot be written is logged. CheckpointError when there are no weight files, one
    cannot be read, or one changes while it is hashed.
    """
    try:
        files = weight_files(checkpoint_dir)
        keys = {file: _FileKey.of(file) for file in files}
    except OSError as error:
        raise CheckpointError(describe_os_error("read", checkpoint_dir, error)) from error
    cache = _read_cache(cache_path)
    known = {} if verify else {file: cache[key] for file, key in keys.items() if key in cache}
    missing = [file for file in files if file not in known]
    if missing:
        with ThreadPoolExecutor(min(_HASH_THREADS, len(missing))) as pool:
            hashes = dict(
                zip(missing, pool.map(_hash_unchanged, [(file, keys[file]) for file in missing]), strict=True)
            )
        known |= hashes
        settled = time.time_ns() - _SETTLE_NS
        fresh = {keys[file]: digest for file, digest in hashes.items() if keys[file].mtime_ns < settled}
        _write_cache(cache_path, cache, fresh)
    return tagged_hash("redknot.weights", ((file.name, known[file].encode()) for file in files))


def _hash_unchanged(job: tuple[Path, _FileKey]) -> str:
    file, key = job
    digest = file_sha256(file)
    if _FileKey.of(file) != key:
        raise CheckpointError(f"{file} changed while it was hashed; wait until the checkpoint is complete")
    return digest


def _read_cache(path: Path) -> dict[_FileKey, str]:
    try:
        document: Any = json.loads(read_small(path))
        if document["version"] != _CACHE_VERSION:
            return {}
        return {
            _FileKey(str(name), int(size), int(mtime_ns), int(inode)): str(digest)
            for name, size, mtime_ns, inode, digest in document["files"]
        }
    except FileNotFoundError:
        return {}
    except (OSError, StoreError, ValueError, KeyError, TypeError, RecursionError) as error:
        _log.warning("weight hash cache %s is unreadable and will be rebuilt: %s", path, error)
        return {}


def _write_cache(path: Path, cache: dict[_FileKey, str], fresh: dict[_FileKey, str]) -> None:
    if not fresh:
        return
    replaced = {key.path for key in fresh}
    merged = {key: digest for key, digest in cache.items() if key.path not in replaced} | fresh
    rows = [[key.path, key.size, key.mtime_ns, key.inode, digest] for key, digest in sorted(merged.items(), key=str)]
    text = json.dumps({"version": _CACHE_VERSION, "files": rows}, indent=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    except OSError as error:
        _log.warning(
            "weight hashes are not cached, the next start reads all weights: %s",
            describe_os_error("write", path, error),
        )
