"""Opening artifacts: the cache of open ones, quarantine of damaged ones, complete verification."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from redknot.artifact.catalogue import Catalogue, put_quarantine, set_state
from redknot.artifact.counters import Counters
from redknot.artifact.loaded import Fault, LoadedArtifact, read_certificate, read_failure
from redknot.artifact.reasons import MalformedFileError, StaleGenerationError
from redknot.artifact.rows import ArtifactRow, ArtifactState, QuarantineRow, TokenRow, token_row
from redknot.artifact.schema import CATALOGUE_FILE, CERTIFICATE_FILE, QUARANTINE_DIR, generation_dir
from redknot.errors import CorruptSectionError, StoreError

_LOADED_CAP = 1024  # artifacts whose certificate and mappings are kept
# A request waits for its fallback: a fault that cannot be recorded in time is recorded by the next one to see it.
_QUARANTINE_WAIT_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VerifyResult:
    """The outcome of reading one artifact completely; ``problems`` is empty when it is sound."""

    artifact_id: str
    namespace: str
    generation: int
    sections: int
    nbytes: int
    problems: tuple[str, ...]


class Reader:
    """Opens the artifacts of one store; usable from several threads."""

    def __init__(self, root: Path, catalogue: Catalogue, counters: Counters, *, mapped: bool) -> None:
        self._root = root
        self._catalogue = catalogue
        self._counters = counters
        self._mapped = mapped
        self._lock = threading.Lock()
        self._loaded: OrderedDict[tuple[str, int], LoadedArtifact] = OrderedDict()

    def open(self, row: ArtifactRow) -> LoadedArtifact:
        """Return a READY row's artifact, from the cache when its files are still the same ones.

        CorruptSectionError, StaleGenerationError, LayoutVersionError or StoreError as its certificate's state is.
        """
        key = (row.artifact_id, row.generation)
        with self._lock:
            known = self._loaded.get(key)
        if known is not None and not known.is_stale():
            with self._lock:
                self._loaded[key] = known
                self._loaded.move_to_end(key)
            self._counters.add("hot_loads")
            return known
        artifact = self._read(row)
        with self._lock:
            self._loaded[key] = artifact
            while len(self._loaded) > _LOADED_CAP:
                self._loaded.popitem(last=False)
        return artifact

    def _read(self, row: ArtifactRow) -> LoadedArtifact:
        directory = generation_dir(self._root, row.artifact_id, row.generation)
        try:
            certificate = read_certificate(directory)
            if (certificate.artifact_id, certificate.generation) != (row.artifact_id, row.generation):
                raise MalformedFileError(f"{directory}: the certificate is of another artifact or generation")
        except (OSError, MalformedFileError) as error:
            subject = (row.artifact_id, row.generation)
            path = directory / CERTIFICATE_FILE
            raise read_failure(subject, "certificate", path, error, self._counters, self._quarantine) from error
        return LoadedArtifact(
            certificate, directory, mapped=self._mapped, counters=self._counters, on_fault=self._quarantine
        )

    def tokens(self, row: ArtifactRow) -> TokenRow:
        """Return an artifact's token ids.

        CorruptSectionError when they are damaged or gone (the artifact is then in quarantine); StaleGenerationError
        when they are gone with their generation.
        """
        ids = self._catalogue.token_bytes(row.artifact_id)
        try:
            return token_row(row, ids)
        except MalformedFileError as error:
            subject = (row.artifact_id, row.generation)
            fault = Fault(*subject, "tokens", CATALOGUE_FILE, str(error), missing=not ids, movable=False)
            raise self._quarantine(fault, self._catalogue.path) from error

    def _quarantine(self, fault: Fault, path: Path) -> StoreError:
        label = f"artifact {fault.artifact_id[:12]} generation {fault.generation}: {fault.section} in {fault.file}"
        moved_to = ""
        after = "quarantined"
        try:
            if fault.missing and not self._is_current(fault):
                return StaleGenerationError(f"{label}: the generation has been replaced or removed")
            with self._catalogue.write(_QUARANTINE_WAIT_S) as connection:
                # Again under the lock: a removal moves the files before it commits.
                if fault.missing and not self._is_current(fault):
                    return StaleGenerationError(f"{label}: the generation has been replaced or removed")
                if fault.movable and path.exists():
                    (self._root / QUARANTINE_DIR).mkdir(exist_ok=True)
                    aside = f"{fault.artifact_id}.g{fault.generation}.{fault.file}.{secrets.token_hex(4)}"
                    os.rename(path, self._root / QUARANTINE_DIR / aside)
                    moved_to = aside
                    self._counters.add("files_quarantined")
                at = time.time()
                record = QuarantineRow(
                    fault.artifact_id, fault.generation, fault.section, fault.file, moved_to, fault.reason, at
                )
                put_quarantine(connection, record)
        except (OSError, StoreError) as error:
            # The reader must fall back whether or not the fault can be recorded (a read-only store, a full disk).
            after = f"not quarantined: {error}"
        self._counters.add("corrupt_sections")
        message = f"{label}: {fault.reason}; {after}"
        _log.error("%s", message)
        return CorruptSectionError(message)

    def _is_current(self, fault: Fault) -> bool:
        rows = self._catalogue.rows(artifact_id=fault.artifact_id)
        return any(row.generation == fault.generation for row in rows)

    def verify(self, row: ArtifactRow) -> VerifyResult:
        """Read every section and the token ids of an artifact again; sound, it is READY afterwards.

        Damaged sections go to quarantine.
        """
        nbytes = 0
        names: tuple[str, ...] = ()
        problems: list[str] = []
        try:
            self.tokens(row)
        except StoreError as error:
            problems.append(str(error))
        try:
            artifact = self._read(row)
            names = tuple(artifact.certificate.sections)
            for name in names:
                try:
                    artifact.section(name)
                    nbytes += artifact.certificate.sections[name].nbytes
                except StoreError as error:
                    problems.append(str(error))
        except StoreError as error:
            problems.append(str(error))
        if not problems and row.state is not ArtifactState.READY:
            with self._catalogue.write() as connection:
                set_state(connection, row.artifact_id, row.generation, ArtifactState.READY)
        return VerifyResult(row.artifact_id, row.namespace, row.generation, len(names), nbytes, tuple(problems))

    def forget(self) -> None:
        """Drop the cache; artifacts already handed out stay valid."""
        with self._lock:
            self._loaded.clear()
