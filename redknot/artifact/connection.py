"""The SQLite connection of a catalogue: one per process, to the file that lies at its path now."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path
from urllib.parse import quote

from redknot.artifact.files import store_error
from redknot.errors import StoreError

SCHEMA_VERSION = 1
APPLICATION_ID = 0x524B4E54  # "RKNT"
BUSY_TIMEOUT_S = 30.0


class CatalogueLink:
    """Connects when asked, and again after a fork or when another file has taken the catalogue's place.

    Not for several threads at once: the catalogue holds its lock.
    """

    def __init__(self, path: Path) -> None:
        self.opened = 0  # how often a file was opened: another count, another file
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._pid = 0
        self._stamp: tuple[int, ...] = ()
        self._inherited: list[sqlite3.Connection] = []

    def connection(self) -> sqlite3.Connection:
        """Return the connection; StoreError when no catalogue of this version is there, sqlite3.Error from SQLite."""
        known = self._connection if self._pid == os.getpid() else None
        if known is not None and known.in_transaction:
            return known
        stamp = self._look()
        if known is not None and stamp == self._stamp:
            return known
        self.close()
        connection = sqlite3.connect(
            self._uri(), uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._connection, self._pid, self._stamp = connection, os.getpid(), stamp
        self.opened += 1
        return connection

    def close(self) -> None:
        """Let go of the connection; the next call connects again."""
        if self._connection is not None and self._pid == os.getpid():
            self._connection.close()
        elif self._connection is not None:
            # Closing a connection inherited over a fork would release the parent's locks: keep it unused.
            self._inherited.append(self._connection)
        self._connection = None

    def check_writable(self) -> None:
        """Raise StoreError where the store can only be read."""
        if not self._is_writable():
            raise StoreError(
                f"the store {self._path.parent} can only be read: its file system or its permissions refuse writing"
            )

    def check_in_place(self) -> None:
        """Raise StoreError when what was opened is not what lies at the path now: whoever looks would not find it."""
        if self._look() != self._stamp:
            raise StoreError(f"the store {self._path.parent} was replaced while it was written: do it again")

    def _is_writable(self) -> bool:
        return os.access(self._path.parent, os.W_OK)

    def _look(self) -> tuple[int, ...]:
        """What tells this file from any other; StoreError when it is gone or no file."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError as error:
            raise StoreError(f"the catalogue {self._path} is gone: build the store again") from error
        except OSError as error:
            raise store_error("open", self._path, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(f"the catalogue {self._path} is not a regular file")
        if self._is_writable():
            return found.st_dev, found.st_ino
        # What is read without SQLite's locks may have been written since, by whoever can.
        return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns, self._log_bytes()

    def _log_bytes(self) -> int:
        """Bytes of changes that are not in the file itself yet."""
        try:
            return os.stat(f"{self._path}-wal").st_size
        except FileNotFoundError:
            return 0

    def _uri(self) -> str:
        """SQLite keeps its locks beside the file; where it cannot, a file that nobody writes is read as it lies."""
        if self._is_writable():
            mode = "rw"
        elif not self._log_bytes():
            mode = "ro&immutable=1"
        elif os.path.exists(f"{self._path}-shm"):
            mode = "ro"
        else:
            way_out = "open the store once where it can be written"
            raise StoreError(f"{self._path}-wal holds changes that cannot be read here: {way_out}")
        return f"file:{quote(str(self._path))}?mode={mode}"

    def _prepare(self, connection: sqlite3.Connection) -> None:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if application != APPLICATION_ID:
            raise StoreError(f"{self._path} is not a RedKnot catalogue")
        if version != SCHEMA_VERSION:
            way_out = "upgrade RedKnot" if version > SCHEMA_VERSION else "build the store again"
            raise StoreError(f"{self._path} has schema version {version}, supported {SCHEMA_VERSION}: {way_out}")
        # NORMAL in WAL mode loses at most the last commits in a power cut, never consistency: an artifact whose
        # commit was lost is an orphan that gc removes.
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")
