"""Opening artifacts: the cache of certificates, quarantine of damaged ones, complete verification."""

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
from redknot.artifact.certificate import Certificate
from redknot.artifact.counters import Counters
from redknot.artifact.loaded import Fault, LoadedArtifact, read_certificate, read_failure
from redknot.artifact.reasons import MalformedFileError, StaleGenerationError
from redknot.artifact.rows import ArtifactRow, ArtifactState, QuarantineRow, TokenRow, token_row
from redknot.artifact.schema import CATALOGUE_FILE, CERTIFICATE_FILE, QUARANTINE_DIR, generation_dir
from redknot.errors import CorruptSectionError, StoreError

_CERTIFICATES_CAP = 1024  # certificates that are kept
# A request waits for its fallback: a fault that cannot be recorded in time is recorded by the next one to see it.
_QUARANTINE_WAIT_S = 1.0

_Stamp = tuple[int, int, int] | None  # None: no such file

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VerifyResult:
    """The outcome of reading one artifact completely; ``problems`` is empty when it is sound."""

    artifact_id: str
    namespace: str
    generation: int
    sections: int
    nbytes: int  # of the sections read, without the headers of their files
    problems: tuple[str, ...]


class Reader:
    """Opens the artifacts of one store; usable from several threads."""

    def __init__(self, root: Path, catalogue: Catalogue, counters: Counters) -> None:
        self._root = root
        self._catalogue = catalogue
        self._counters = counters
        self._lock = threading.Lock()
        self._certificates: OrderedDict[tuple[str, int], tuple[_Stamp, Certificate]] = OrderedDict()

    def open(self, row: ArtifactRow) -> LoadedArtifact:
        """Return a READY row's artifact; its certificate comes from the cache when its file is still the same one.

        CorruptSectionError, StaleGenerationError, LayoutVersionError or StoreError as its certificate's state is.
        """
        key = (row.artifact_id, row.generation)
        directory = generation_dir(self._root, *key)
        stamp = _stamp(directory / CERTIFICATE_FILE)
        with self._lock:
            known = self._certificates.get(key)
        if known is not None and known[0] == stamp:
            self._counters.add("hot_loads")
            certificate = known[1]
        else:
            certificate = self._certificate(row, directory)
        with self._lock:
            self._certificates[key] = (stamp, certificate)
            self._certificates.move_to_end(key)
            while len(self._certificates) > _CERTIFICATES_CAP:
                self._certificates.popitem(last=False)
        return self._loaded(certificate, directory)

    def _certificate(self, row: ArtifactRow, directory: Path) -> Certificate:
        try:
            certificate = read_certificate(directory)
            if (certificate.artifact_id, certificate.generation) != (row.artifact_id, row.generation):
                raise MalformedFileError(f"{directory}: the certificate is of another artifact or generation")
        except (OSError, MalformedFileError) as error:
            subject = (row.artifact_id, row.generation)
            path = directory / CERTIFICATE_FILE
            raise read_failure(subject, "certificate", path, error, self._counters, self._quarantine) from error
        return certificate

    def _loaded(self, certificate: Certificate, directory: Path) -> LoadedArtifact:
        return LoadedArtifact(certificate, directory, counters=self._counters, on_fault=self._quarantine)

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
                if fault.movable and path.is_file():
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
        problems: list[str] = []
        sections = nbytes = 0
        try:
            self.tokens(row)
        except StoreError as error:
            problems.append(str(error))
        try:
            directory = generation_dir(self._root, row.artifact_id, row.generation)
            artifact = self._loaded(self._certificate(row, directory), directory)
            sections = len(artifact.certificate.sections)
            nbytes = _read_all(artifact, problems)
        except StoreError as error:
            problems.append(str(error))
        if not problems and row.state is not ArtifactState.READY:
            with self._catalogue.write() as connection:
                set_state(connection, row.artifact_id, row.generation, ArtifactState.READY)
        return VerifyResult(row.artifact_id, row.namespace, row.generation, sections, nbytes, tuple(problems))

    def forget(self) -> None:
        """Drop the cache; artifacts already handed out stay valid."""
        with self._lock:
            self._certificates.clear()


def _read_all(artifact: LoadedArtifact, problems: list[str]) -> int:
    """Read every section and return the bytes that are sound; of a file with a problem the first one is added."""
    nbytes = 0
    failed = set()
    for name, record in artifact.certificate.sections.items():
        if record.file in failed:  # it is in quarantine by now
            continue
        try:
            artifact.read(name)
            nbytes += record.nbytes
        except StoreError as error:
            failed.add(record.file)
            problems.append(str(error))
    return nbytes


def _stamp(path: Path) -> _Stamp:
    """What tells a file from any other that lies or lay at its path; the time of change cannot be set back."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_ctime_ns
