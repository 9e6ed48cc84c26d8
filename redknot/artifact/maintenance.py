"""Keeping a store in order: gc, doctor, the count of bytes. Nothing here reads payloads."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from redknot.artifact.catalogue import Catalogue, forget_quarantined_file
from redknot.artifact.files import store_error
from redknot.artifact.loaded import read_certificate
from redknot.artifact.rows import ArtifactRow, ArtifactState, token_row
from redknot.artifact.schema import (
    CERTIFICATE_FILE,
    OBJECTS_DIR,
    QUARANTINE_DIR,
    TEMPORARY_DIR,
    generation_dir,
    parse_generation,
)
from redknot.artifact.temporary import delete_tree, directory_bytes, is_abandoned, move_to_trash
from redknot.errors import StoreError

_LOW_SPACE_SHARE = 0.05
_LOW_SPACE_BYTES = 2**30


@dataclass(frozen=True)
class GcReport:
    """What gc removed: directories, files of the quarantine, and the bytes of both."""

    temporary: int
    superseded: int
    orphaned: int
    quarantined: int
    nbytes: int


@dataclass(frozen=True)
class StoreBytes:
    """Bytes of the files of a store, counted on disk."""

    objects: int
    temporary: int
    quarantine: int
    catalogue: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.objects + self.temporary + self.quarantine + self.catalogue


@dataclass(frozen=True)
class Finding:
    """One thing that doctor noticed; ``severity`` is "error" or "warning"."""

    severity: str
    code: str
    path: str
    message: str


def generations_on_disk(root: Path) -> Iterator[tuple[str, int, Path]]:
    """Yield (artifact id, generation, directory) of everything below objects/."""
    for prefix in _directories(root / OBJECTS_DIR):
        for artifact in _directories(prefix):
            for directory in _directories(artifact):
                generation = parse_generation(directory.name)
                if generation is not None:
                    yield artifact.name, generation, directory


def _files(path: Path) -> list[Path]:
    """Everything in a folder that is not a folder; empty where there is none."""
    try:
        with os.scandir(path) as entries:
            return sorted(Path(entry.path) for entry in entries if not entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def _directories(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def collect_garbage(root: Path, catalogue: Catalogue, *, grace_s: float, temporary_age_s: float) -> GcReport:
    """Remove what no reader can find any more.

    Temporary directories of dead builders (or older than ``temporary_age_s``), generations superseded for
    ``grace_s`` seconds, generations never catalogued that are that old, and files that lie in quarantine for so
    long or whose artifact was removed. A live publisher is never disturbed: objects/ and quarantine/ change only
    under the catalogue's write lock. StoreError when the store cannot be changed.
    """
    nbytes = temporary = superseded = orphaned = 0
    trash: list[Path] = []
    try:
        for directory in _directories(root / TEMPORARY_DIR):
            if is_abandoned(directory, temporary_age_s):
                temporary += 1
                nbytes += directory_bytes(directory)
                delete_tree(directory)
        with catalogue.write() as connection:
            rows = {row.artifact_id: row for row in catalogue.rows()}
            for artifact_id, generation, directory in list(generations_on_disk(root)):
                row = rows.get(artifact_id)
                if row is not None and row.generation == generation:
                    continue
                old = row is not None and generation < row.generation
                since = row.created if row is not None and old else directory.stat().st_ctime
                if time.time() - since < grace_s:
                    continue
                superseded, orphaned = superseded + old, orphaned + (not old)
                trash.append(move_to_trash(root, directory))
                remove_empty(directory.parent)
            files, freed = _empty_quarantine(root, catalogue, connection, grace_s)
    except OSError as error:
        raise store_error("collect garbage in", root, error) from error
    for directory in trash:
        nbytes += directory_bytes(directory)
        delete_tree(directory)
    return GcReport(temporary, superseded, orphaned, files, nbytes + freed)


def _empty_quarantine(
    root: Path, catalogue: Catalogue, connection: sqlite3.Connection, grace_s: float
) -> tuple[int, int]:
    """Delete the files that nobody will look into any more, inside ``Catalogue.write``; returns (files, bytes).

    The record of a fault outlives its file: it says why the artifact is out of service.
    """
    since = {record.moved_to: record.at for record in catalogue.quarantined() if record.moved_to}
    count = nbytes = 0
    for path in _files(root / QUARANTINE_DIR):
        at = since.get(path.name)
        if at is not None and time.time() - at < grace_s:
            continue
        size = path.stat(follow_symlinks=False).st_size
        path.unlink()
        forget_quarantined_file(connection, path.name)
        count, nbytes = count + 1, nbytes + size
    return count, nbytes


def remove_empty(artifact_dir: Path) -> None:
    """Remove an artifact's directory and its prefix where they are empty; inside ``Catalogue.write``."""
    for path in (artifact_dir, artifact_dir.parent):
        try:
            path.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return  # not empty


def count_bytes(root: Path, catalogue_path: Path) -> StoreBytes:
    """Count a store's files on disk."""
    catalogue = sum(
        os.stat(path).st_size for suffix in ("", "-wal", "-shm") if (path := Path(f"{catalogue_path}{suffix}")).exists()
    )
    return StoreBytes(
        objects=directory_bytes(root / OBJECTS_DIR),
        temporary=directory_bytes(root / TEMPORARY_DIR),
        quarantine=directory_bytes(root / QUARANTINE_DIR),
        catalogue=catalogue,
    )


def examine(root: Path, catalogue: Catalogue, *, temporary_age_s: float) -> tuple[Finding, ...]:
    """Check the catalogue, compare it with the files, look at permissions and free space; payloads are not read."""
    found: list[Finding] = []
    for (line,) in catalogue.query("PRAGMA quick_check"):
        if line != "ok":
            found.append(Finding("error", "catalogue_damaged", str(catalogue.path), str(line)))
    rows = {row.artifact_id: row for row in catalogue.rows()}
    for row in rows.values():
        found += _examine_artifact(root, catalogue, row)
    for artifact_id, generation, directory in generations_on_disk(root):
        known = rows.get(artifact_id)
        if known is None or generation != known.generation:
            text = "not in the catalogue; gc removes it" if known is None else "superseded; gc removes it"
            code = "orphan" if known is None else "superseded"
            found.append(Finding("warning", code, str(directory), text))
    for directory in _directories(root / TEMPORARY_DIR):
        if is_abandoned(directory, temporary_age_s):
            found.append(
                Finding("warning", "abandoned_temporary", str(directory), "its builder is gone; gc removes it")
            )
    found += _examine_disk(root)
    return tuple(found)


def _examine_artifact(root: Path, catalogue: Catalogue, row: ArtifactRow) -> list[Finding]:
    directory = generation_dir(root, row.artifact_id, row.generation)
    where = str(directory)
    if row.state is ArtifactState.QUARANTINED:
        return [
            Finding("error", "quarantined", where, "a check failed; build it again, or verify it if it was repaired")
        ]
    found: list[Finding] = []
    try:
        token_row(row, catalogue.token_bytes(row.artifact_id))
    except StoreError as error:
        found.append(Finding("error", "tokens_damaged", where, f"in {catalogue.path.name}: {error}; build it again"))
    try:
        certificate = read_certificate(directory)
    except OSError as error:
        text = str(store_error("read", directory, error))
        return [*found, Finding("error", "certificate_unreadable", where, text)]
    except StoreError as error:
        return [*found, Finding("error", "certificate_invalid", where, str(error))]
    if (certificate.artifact_id, certificate.generation) != (row.artifact_id, row.generation):
        found.append(
            Finding("error", "certificate_other", where, "the certificate is of another artifact or generation")
        )
    expected = {record.file for record in certificate.sections.values()} | {CERTIFICATE_FILE}
    present = set(os.listdir(directory))
    for name in sorted(expected - present):
        found.append(Finding("error", "file_missing", str(directory / name), "declared by the certificate"))
    for name in sorted(present - expected):
        found.append(Finding("warning", "file_unknown", str(directory / name), "not declared by the certificate"))
    if not expected - present:
        size = directory_bytes(directory)
        if size != row.nbytes:
            text = f"{size} bytes on disk, {row.nbytes} when published"
            found.append(Finding("error", "size_mismatch", where, text))
    return found


def _examine_disk(root: Path) -> list[Finding]:
    found: list[Finding] = []
    for name in (".", OBJECTS_DIR, TEMPORARY_DIR, QUARANTINE_DIR):
        path = root / name
        if not path.is_dir():
            found.append(Finding("warning", "directory_missing", str(path), "made again when needed"))
        elif not os.access(path, os.R_OK | os.X_OK):
            found.append(Finding("error", "permission", str(path), "not readable by this user"))
        elif not os.access(path, os.W_OK):
            found.append(Finding("warning", "read_only", str(path), "not writable by this user: can only be read"))
    usage = shutil.disk_usage(root)
    if usage.free < min(_LOW_SPACE_BYTES, usage.total * _LOW_SPACE_SHARE):
        text = f"{usage.free} bytes free of {usage.total}"
        found.append(Finding("warning", "low_space", str(root), text))
    return found
