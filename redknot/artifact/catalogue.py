"""The catalogue of a store: which artifacts exist, under which names, with which tokens. SQLite in WAL mode.

The catalogue's write lock is also the store's lock: whoever adds, moves or removes anything below objects/
does it inside ``Catalogue.write``.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from redknot.artifact.connection import APPLICATION_ID, BUSY_TIMEOUT_S, SCHEMA_VERSION, CatalogueLink
from redknot.artifact.identity import ModelIdentity
from redknot.artifact.rows import (
    ARTIFACT_COLUMNS,
    ArtifactRow,
    ArtifactState,
    QuarantineRow,
    artifact_row,
)
from redknot.errors import StoreError

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
INSERT INTO meta VALUES ('revision', 0);
CREATE TABLE models (digest TEXT PRIMARY KEY, identity TEXT NOT NULL) STRICT;
CREATE TABLE artifacts (
    artifact_id TEXT PRIMARY KEY, namespace TEXT NOT NULL, model TEXT NOT NULL REFERENCES models(digest),
    token_hash TEXT NOT NULL, token_count INTEGER NOT NULL, nbytes INTEGER NOT NULL, generation INTEGER NOT NULL,
    needs TEXT NOT NULL, world INTEGER NOT NULL, state TEXT NOT NULL, created REAL NOT NULL, last_used REAL NOT NULL
) STRICT;
CREATE INDEX artifacts_by_model ON artifacts (namespace, model);
CREATE INDEX artifacts_by_tokens ON artifacts (namespace, token_hash);
CREATE TABLE tokens (
    artifact_id TEXT PRIMARY KEY REFERENCES artifacts(artifact_id) ON DELETE CASCADE, ids BLOB NOT NULL
) STRICT;
CREATE TABLE documents (
    namespace TEXT NOT NULL, name TEXT NOT NULL,
    artifact_id TEXT NOT NULL REFERENCES artifacts(artifact_id) ON DELETE CASCADE,
    PRIMARY KEY (namespace, name, artifact_id)
) STRICT;
CREATE INDEX documents_by_artifact ON documents (artifact_id);
CREATE TABLE quarantined (
    artifact_id TEXT NOT NULL, generation INTEGER NOT NULL, section TEXT NOT NULL, file TEXT NOT NULL,
    moved_to TEXT NOT NULL, reason TEXT NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (artifact_id, generation, section, file)
) STRICT;
"""


class Catalogue:
    """One open catalogue; usable from several threads, and from a forked child (which reconnects)."""

    def __init__(self, path: Path) -> None:
        """Open an existing catalogue; StoreError when it is none, or of another version."""
        self.path = path
        self._lock = threading.RLock()
        self._link = CatalogueLink(path)
        with self._guard():
            self._link.connection()

    @staticmethod
    def create(path: Path) -> Catalogue:
        """Make a catalogue, or open the one that is there; the caller holds the store's creation lock."""
        # Made aside: whoever opens the store without the lock finds a whole catalogue or none.
        made = path if path.exists() else path.with_name(f"{path.name}.new")
        try:
            connection = sqlite3.connect(made, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            try:
                if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0:
                    connection.execute("PRAGMA journal_mode=WAL")
                    versions = f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={SCHEMA_VERSION};"
                    connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} {versions} COMMIT;")
            finally:
                connection.close()
            os.replace(made, path)
        except sqlite3.Error as error:
            raise StoreError(f"cannot create the catalogue {path}: {error}") from error
        return Catalogue(path)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise StoreError(f"catalogue {self.path}: {error}") from error

    @contextmanager
    def write(self, wait_s: float = BUSY_TIMEOUT_S, *, counts: bool = True) -> Iterator[sqlite3.Connection]:
        """Hold the store's write lock; committed at the end of the block, rolled back when it raises.

        What ``counts`` moves the revision. StoreError when another process holds the lock for ``wait_s`` seconds, the
        commit fails, or the store can only be read.
        """
        with self._lock, self._guard():
            connection = self._link.connection()
            self._link.check_writable()
            connection.execute(f"PRAGMA busy_timeout={int(wait_s * 1000)}")
            try:
                connection.execute("BEGIN IMMEDIATE")
            finally:
                connection.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}")
            try:
                yield connection
                if counts:
                    connection.execute("UPDATE meta SET value = value + 1 WHERE key = 'revision'")
                self._link.check_in_place()
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def query(self, sql: str, values: Sequence[object] = ()) -> list[tuple[object, ...]]:
        """Return the rows of one read; StoreError when the catalogue cannot be read."""
        with self._lock, self._guard():
            return self._link.connection().execute(sql, values).fetchall()

    def close(self) -> None:
        """Close this process's connection; a later call opens it again."""
        with self._lock, self._guard():
            self._link.close()

    @property
    def revision(self) -> tuple[int, int]:
        """(how often a file was opened here, a number that grows with every change of it but times of last use).

        When both are the same, so is the rest.
        """
        with self._lock:
            found = self.query("SELECT value FROM meta WHERE key = 'revision'")
            if not found:
                raise StoreError(f"catalogue {self.path} is damaged: it has no revision; build the store again")
            return self._link.opened, int(str(found[0][0]))

    def row(self, artifact_id: str, namespace: str) -> ArtifactRow | None:
        """Return an artifact of this namespace, None when there is none."""
        found = self.rows(namespace, artifact_id=artifact_id)
        return found[0] if found else None

    def rows(
        self,
        namespace: str | None = None,
        *,
        artifact_id: str | None = None,
        model: str | None = None,
        token_hash: str | None = None,
        name: str | None = None,
    ) -> tuple[ArtifactRow, ...]:
        """Return the artifacts that equal every value given (None: any), oldest first."""
        given = {"namespace": namespace, "artifact_id": artifact_id, "model": model, "token_hash": token_hash}
        equal = {column: value for column, value in given.items() if value is not None}
        clauses = [f"{column} = ?" for column in equal]
        values = list(equal.values())
        if name is not None:
            clauses.append("artifact_id IN (SELECT artifact_id FROM documents WHERE name = ?)")
            values.append(name)
        where = " AND ".join(clauses) or "1"
        sql = f"SELECT {ARTIFACT_COLUMNS} FROM artifacts WHERE {where} ORDER BY created, artifact_id"
        return tuple(artifact_row(found) for found in self.query(sql, values))

    def token_bytes(self, artifact_id: str) -> bytes:
        """Return the stored token ids of one artifact, empty where nothing is; ``rows.token_row`` tells a sound one."""
        found = self.query("SELECT ids FROM tokens WHERE artifact_id = ?", (artifact_id,))
        return _bytes(found[0][0]) if found else b""

    def names(self, namespace: str, artifact_id: str) -> tuple[str, ...]:
        """Return the document names of an artifact, sorted."""
        sql = "SELECT name FROM documents WHERE namespace = ? AND artifact_id = ? ORDER BY name"
        return tuple(str(name) for (name,) in self.query(sql, (namespace, artifact_id)))

    def identities(self, namespace: str) -> tuple[ModelIdentity, ...]:
        """Return the models that this namespace has artifacts of: what a miss is compared with."""
        sql = "SELECT identity FROM models WHERE digest IN (SELECT model FROM artifacts WHERE namespace = ?)"
        try:
            return tuple(ModelIdentity.model_validate_json(str(text)) for (text,) in self.query(sql, (namespace,)))
        except ValueError as error:
            raise StoreError(f"catalogue {self.path}: a model's record is damaged: {error}") from error

    def quarantined(self, artifact_id: str | None = None) -> tuple[QuarantineRow, ...]:
        """Return what has been quarantined, oldest first."""
        sql = "SELECT * FROM quarantined WHERE ? IS NULL OR artifact_id = ? ORDER BY at"
        return tuple(QuarantineRow(*row) for row in self.query(sql, (artifact_id, artifact_id)))  # type: ignore[arg-type]

    def touch(self, used: dict[str, float], wait_s: float = BUSY_TIMEOUT_S) -> None:
        """Record when artifacts were last used, {artifact id: seconds since the epoch}; errors as ``write``."""
        with self.write(wait_s, counts=False) as connection:
            sql = "UPDATE artifacts SET last_used = max(last_used, ?) WHERE artifact_id = ?"
            connection.executemany(sql, [(at, artifact_id) for artifact_id, at in used.items()])


def _bytes(value: object) -> bytes:
    """A blob; a damaged record may hold any other type, and none of them is token ids."""
    return value if isinstance(value, bytes) else b""


def put_artifact(connection: sqlite3.Connection, row: ArtifactRow, model: ModelIdentity, token_ids: bytes) -> None:
    """Insert an artifact or move it to a new generation, inside ``Catalogue.write``."""
    connection.execute("INSERT OR IGNORE INTO models VALUES (?, ?)", (row.model, model.model_dump_json()))
    columns = ARTIFACT_COLUMNS.split(", ")
    sql = (
        f"INSERT INTO artifacts ({ARTIFACT_COLUMNS}) VALUES ({', '.join('?' * len(columns))}) "
        f"ON CONFLICT (artifact_id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in columns[1:])}"
    )
    values = [getattr(row, name) for name in columns]
    values[columns.index("needs")] = json.dumps(row.needs)
    connection.execute(sql, values)
    connection.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?)", (row.artifact_id, token_ids))


def put_names(connection: sqlite3.Connection, row: ArtifactRow, names: Iterable[str]) -> None:
    """Give an artifact document names; a name moves from older content of the same model, needs and TP size."""
    for name in names:
        connection.execute(
            "DELETE FROM documents WHERE namespace = ? AND name = ? AND artifact_id IN "
            "(SELECT artifact_id FROM artifacts WHERE namespace = ? AND model = ? AND needs = ? AND world = ?)",
            (row.namespace, name, row.namespace, row.model, json.dumps(row.needs), row.world),
        )
        connection.execute("INSERT INTO documents VALUES (?, ?, ?)", (row.namespace, name, row.artifact_id))


def generation_of(connection: sqlite3.Connection, artifact_id: str) -> int:
    """Return the catalogued generation of an artifact, 0 when there is none."""
    found = connection.execute("SELECT generation FROM artifacts WHERE artifact_id = ?", (artifact_id,)).fetchone()
    return 0 if found is None else int(found[0])


def put_quarantine(connection: sqlite3.Connection, row: QuarantineRow) -> None:
    """Record a fault and take the artifact out of service, unless a newer generation has replaced it."""
    values = (row.artifact_id, row.generation, row.section, row.file, row.moved_to, row.reason, row.at)
    connection.execute("INSERT OR IGNORE INTO quarantined VALUES (?, ?, ?, ?, ?, ?, ?)", values)
    set_state(connection, row.artifact_id, row.generation, ArtifactState.QUARANTINED)


def forget_quarantined_file(connection: sqlite3.Connection, name: str) -> None:
    """Note that a file of the quarantine is gone; the records of its faults stay. Inside ``Catalogue.write``."""
    connection.execute("UPDATE quarantined SET moved_to = '' WHERE moved_to = ?", (name,))


def set_state(connection: sqlite3.Connection, artifact_id: str, generation: int, state: ArtifactState) -> None:
    """Set the state of one generation, if it is the current one; READY also clears its quarantine records."""
    connection.execute(
        "UPDATE artifacts SET state = ? WHERE artifact_id = ? AND generation = ?", (state, artifact_id, generation)
    )
    if state is ArtifactState.READY:
        connection.execute(
            "DELETE FROM quarantined WHERE artifact_id = ? AND generation = ?", (artifact_id, generation)
        )
