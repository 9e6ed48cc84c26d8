"""The disk tier: one file a block below one folder, which any number of processes may use at the same time.

    <folder>/<layout>/blocks/<address>.block    whole blocks, never changed
    <folder>/<layout>/aside/                    being written
    <folder>/<layout>/quarantine/               damaged files, for whoever wants to know why

What a process knows of the folder (which files, how many bytes) it takes from the folder itself, at the start and again
every so many writes; a file that another process removed is a miss. Nothing here fails because of the disk: what cannot
be written is refused and what cannot be read is a miss, and both are counted. Imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import secrets
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from redknot.durable import sync_folder
from redknot.latents.books import DISK_COUNTERS, Book, Counters, differences
from redknot.latents.content import Name, address
from redknot.latents.diskfile import (
    PREFIX_BYTES,
    DamagedFileError,
    bounded_folder,
    folder_bytes,
    private_folder,
    read_block,
    remove_left_over,
    removed,
    write_block,
)

_log = logging.getLogger(__name__)
BLOCK_FILE = re.compile(r"([0-9a-f]{64})\.block")
_QUARANTINE_SHARE = 8  # damaged files fill at most an eighth of the budget; further ones are deleted


class Written(StrEnum):
    """What became of a write."""

    STORED = "stored"
    PRESENT = "present"  # the same bytes were there
    COLLIDED = "collided"  # other bytes were there, and stay
    REFUSED = "refused"  # no room, or the disk failed


class DiskTier:
    """Blocks of ``nbytes`` bytes of one layout, on at most ``budget`` bytes of disk, the least recently used leaving.

    Every process evicts and counts by what it knows: several of them may overrun the budget together, by what all
    write between two looks at the folder. Safe to use from threads. Needs a local file system with flock.
    """

    def __init__(self, folder: Path, layout: bytes, nbytes: int, budget: int) -> None:
        """Open or create; StoreError when the folder cannot be used."""
        self.nbytes = nbytes
        self.budget = budget
        self.file_bytes = PREFIX_BYTES + nbytes
        self.counters = Counters(DISK_COUNTERS)
        self._layout = layout
        root = private_folder(folder) / hashlib.blake2b(layout, digest_size=16).hexdigest()
        private_folder(root)
        self._blocks, self._aside, self._quarantine = (
            private_folder(root / name) for name in ("blocks", "aside", "quarantine")
        )
        self._prefix = f"{self._blocks}{os.sep}"  # joining paths takes longer than looking one up
        self._quarantine_bytes = budget // _QUARANTINE_SHARE
        self._scan_every = max(16, budget // self.file_bytes // 16)  # writes
        self._writing = threading.Lock()  # one write, eviction or scan at a time; held over IO, unlike _lock
        self._scratch = bytearray(nbytes)  # for the block that a write finds in its place; under _writing
        self._lock = threading.Lock()  # of what follows and of the counters
        self._index: OrderedDict[bytes, None] = OrderedDict()  # addresses, least recently used first
        self._quarantined = 0  # bytes
        self._unscanned = 0  # writes since the last scan
        self.refresh()

    def holds(self, name: Name) -> bool:
        """Whether a block was there when this process looked last; touches no disk."""
        where = address(self._layout, name)
        with self._lock:
            return where in self._index

    def read(self, name: Name, into: memoryview) -> float | None:
        """Fill ``into`` (``nbytes`` bytes) with a block and return its cost; None for a miss: ``into`` is undefined."""
        where = address(self._layout, name)
        cost = self._load(where, into)
        with self._lock:
            self.counters["disk_misses" if cost is None else "disk_reads"] += 1
        return cost

    def write(self, name: Name, payload: memoryview, cost: float) -> Written:
        """Store a block; what is there already under its name stays, whatever it is."""
        where = address(self._layout, name)
        with self._writing:
            if self._load(where, memoryview(self._scratch)) is not None:
                same = self._scratch == payload
                self._count("disk_present" if same else "disk_collisions")
                return Written.PRESENT if same else Written.COLLIDED
            if self._unscanned >= self._scan_every:
                self._scan()
            if not self._make_room():
                return Written.REFUSED
            return self._store(where, payload, cost)

    def refresh(self) -> None:
        """Look at the folder again: what other processes wrote and removed, and what dead ones left."""
        with self._writing:
            self._scan()

    def book(self) -> Book:
        """Bytes of files, as this process knows them."""
        with self._lock:
            return Book(self.budget, len(self._index) * self.file_bytes, self._quarantined)

    def recount(self) -> list[str]:
        """Differences between what this process knows and the folder; others that write meanwhile cause some, too."""
        with self._writing:
            found = {where for where, time_ns in self._entries() if time_ns is not None}
            with self._lock:
                known, quarantined = set(self._index), self._quarantined
            return [
                *differences("disk blocks", sorted(known - found), []),
                *differences("disk blocks", [], sorted(found - known)),
                *differences("disk bytes quarantined", quarantined, folder_bytes(self._quarantine)),
                *differences("unfinished files", 0, len(os.listdir(self._aside))),
            ]

    def counts(self) -> dict[str, int]:
        """All counters."""
        with self._lock:
            return dict(self.counters)

    def _load(self, where: bytes, into: memoryview) -> float | None:
        try:
            cost = read_block(self._path(where), where, into)
        except FileNotFoundError:
            if self._forget(where):
                self._count("disk_vanished")
            return None
        except DamagedFileError as error:
            self._set_aside(where, str(error))
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                self._set_aside(where, f"{self._path(where)} is a link")
            else:
                self._failed("read", self._path(where), error)
            return None
        with self._lock:
            self._index[where] = None
            self._index.move_to_end(where)
        return cost

    def _store(self, where: bytes, payload: memoryview, cost: float) -> Written:
        try:
            write_block(self._path(where), self._aside, where, payload, cost)
        except OSError as error:
            self._failed("write", self._path(where), error)
            return Written.REFUSED
        with self._lock:
            self._index[where] = None
            self._index.move_to_end(where)
            self._unscanned += 1
            self.counters["disk_writes"] += 1
        try:
            sync_folder(self._blocks)
        except OSError as error:  # the block is there; only a power cut could still take its name
            self._failed("sync", self._blocks, error)
        return Written.STORED

    def _make_room(self) -> bool:
        """Evict until one more file fits into the budget; whether it does."""
        while True:
            with self._lock:
                if (len(self._index) + 1) * self.file_bytes + self._quarantined <= self.budget:
                    return True
                victim = next(iter(self._index), None)
                if victim is None:
                    self.counters["disk_full"] += 1
                    return False
            try:
                os.unlink(self._path(victim))
            except FileNotFoundError:
                self._count("disk_vanished")
            except OSError as error:
                self._failed("evict", self._path(victim), error)
                return False
            else:
                self._count("disk_evictions")
            self._forget(victim)

    def _set_aside(self, where: bytes, reason: str) -> None:
        """Quarantine what lies at a block's place; where that fails it stays there, a miss each time."""
        source = self._path(where)
        target = self._quarantine / f"{os.path.basename(source)}.{secrets.token_hex(4)}"
        try:
            size = os.lstat(source).st_size
            os.rename(source, target)
        except FileNotFoundError:
            self._forget(where)
            return
        except OSError as error:
            self._failed("quarantine", source, error)
            return
        _log.warning("%s; it is in quarantine as %s", reason, target.name)
        self._forget(where)
        with self._lock:
            self.counters["disk_quarantined"] += 1
            self._quarantined += size
            full = self._quarantined > self._quarantine_bytes
        if full and removed(target):
            with self._lock:
                self._quarantined -= size

    def _scan(self) -> None:
        found: list[tuple[int, bytes]] = []
        try:
            for where, time_ns in self._entries():
                if time_ns is None:
                    self._set_aside(where, f"{self._path(where)} is no file of {self.file_bytes} bytes")
                else:
                    found.append((time_ns, where))
            left_over = sum(remove_left_over(self._aside / name) for name in os.listdir(self._aside))
            quarantined = bounded_folder(self._quarantine, self._quarantine_bytes)
        except OSError as error:
            self._failed("scan", self._blocks, error)
            return
        with self._lock:
            self._index = OrderedDict.fromkeys(where for _, where in sorted(found))
            self._quarantined = quarantined
            self._unscanned = 0
            self.counters["disk_left_over"] += left_over

    def _entries(self) -> Iterator[tuple[bytes, int | None]]:
        """Address and time of what lies under the name of a block; no time where it is no file of a block's size."""
        with os.scandir(self._blocks) as entries:
            for entry in entries:
                match = BLOCK_FILE.fullmatch(entry.name)
                if match is None:
                    self._count("disk_foreign")
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # removed by another process
                whole = stat.S_ISREG(found.st_mode) and found.st_size == self.file_bytes
                yield bytes.fromhex(match.group(1)), found.st_mtime_ns if whole else None

    def _path(self, where: bytes) -> str:
        return f"{self._prefix}{where.hex()}.block"

    def _forget(self, where: bytes) -> bool:
        with self._lock:
            known = where in self._index
            self._index.pop(where, None)
            return known

    def _failed(self, action: str, path: str | Path, error: OSError) -> None:
        number = error.errno or 0
        _log.warning("cannot %s %s: errno %s (%s)", action, path, number, error.strerror or errno.errorcode.get(number))
        self._count("io_errors")

    def _count(self, name: str) -> None:
        with self._lock:
            self.counters[name] += 1
