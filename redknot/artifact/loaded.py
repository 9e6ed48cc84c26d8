"""One artifact opened for reading: sections come from mapped files and are verified before first use."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from redknot.artifact.certificate import Certificate, parse_certificate
from redknot.artifact.counters import Counters
from redknot.artifact.files import SafetensorsFile, byte_view, checksum, read_small, store_error
from redknot.artifact.reasons import MalformedFileError, MissingSectionError
from redknot.artifact.schema import CERTIFICATE_FILE
from redknot.errors import CorruptSectionError, StoreError

# Faults of this process, not of the file: the artifact stays in service.
_TRANSIENT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN})
# The file may be sound for its owner: the artifact leaves service, the file stays where it is.
_NOT_OURS = frozenset({errno.EACCES, errno.EPERM})


@dataclass(frozen=True)
class Fault:
    """Something wrong with one file of one generation."""

    artifact_id: str
    generation: int
    section: str  # the section asked for, or "certificate", or "tokens"
    file: str
    reason: str
    missing: bool = False  # the file is not there: corrupt, or the generation was replaced
    movable: bool = True


# Quarantines, counts and returns what the reader must raise.
FaultHandler = Callable[[Fault, Path], StoreError]


class LoadedArtifact:
    """A certificate and lazily read sections of one generation.

    Tensors are shared and must be treated as read only. A mapped file stays readable after a newer generation
    or gc has removed its name. Usable from several threads.
    """

    def __init__(
        self, certificate: Certificate, directory: Path, *, mapped: bool, counters: Counters, on_fault: FaultHandler
    ) -> None:
        self.certificate = certificate
        self.directory = directory
        self._mapped = mapped
        self._counters = counters
        self._on_fault = on_fault
        self._lock = threading.RLock()
        self._files: dict[str, SafetensorsFile] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._failed: dict[str, str] = {}
        self._certificate_stat = _identity_of(directory / CERTIFICATE_FILE)

    def section(self, name: str) -> torch.Tensor:
        """Return one section, shape and dtype as in the certificate; its checksum is verified on first use.

        MissingSectionError when the certificate does not list it; CorruptSectionError when its file is gone,
        unreadable, malformed or damaged (it is then in quarantine); StaleGenerationError when the file is gone
        because the generation was replaced; StoreError when this process is out of memory or descriptors.
        """
        with self._lock:
            known = self._tensors.get(name)
            if known is not None:
                return known
            if name in self._failed:
                raise CorruptSectionError(self._failed[name])
            record = self.certificate.sections.get(name)
            if record is None:
                raise MissingSectionError(f"artifact {self.certificate.artifact_id[:12]} has no section {name[:80]}")
            try:
                tensor = self._open(record.file).tensor(name)
                if checksum(byte_view(tensor)) != record.checksum:
                    raise MalformedFileError(f"its {record.nbytes} bytes do not match their checksum")
            except (OSError, MalformedFileError) as error:
                path = self.directory / record.file
                failure = read_failure(self.certificate, name, path, error, self._counters, self._on_fault)
                if isinstance(failure, CorruptSectionError):
                    self._failed[name] = str(failure)
                raise failure from error
            self._counters.add("sections_verified")
            self._counters.add("bytes_verified", record.nbytes)
            # Without a mapping the memory belongs to the caller, and a later read is verified again.
            if self._mapped:
                self._tensors[name] = tensor
            return tensor

    def is_stale(self) -> bool:
        """Say whether a new load must open it again: a section failed, or an open file was altered or removed."""
        with self._lock:
            if self._failed or _identity_of(self.directory / CERTIFICATE_FILE) != self._certificate_stat:
                return True
            return any(file.changed() for file in self._files.values())

    def _open(self, name: str) -> SafetensorsFile:
        known = self._files.get(name)
        if known is not None:
            return known
        file = SafetensorsFile(self.directory / name, mapped=self._mapped)
        found = {section: (entry.dtype, entry.shape) for section, entry in file.entries.items()}
        sections = self.certificate.sections.items()
        declared = {section: (record.dtype, record.shape) for section, record in sections if record.file == name}
        if found != declared:
            raise MalformedFileError(f"{name} holds other sections, dtypes or shapes than its certificate declares")
        self._files[name] = file
        return file


def read_certificate(directory: Path) -> Certificate:
    """Read an artifact's certificate; errors as ``parse_certificate``, OSError from the disk."""
    return parse_certificate(read_small(directory / CERTIFICATE_FILE))


def read_failure(
    subject: Certificate | tuple[str, int],
    section: str,
    path: Path,
    error: OSError | MalformedFileError,
    counters: Counters,
    on_fault: FaultHandler,
) -> StoreError:
    """Turn a failed read of one file into the error to raise, quarantining where the file is at fault.

    ``subject`` is the certificate, or (artifact id, generation) where there is none yet.
    """
    if isinstance(subject, Certificate):
        subject = (subject.artifact_id, subject.generation)
    if isinstance(error, MalformedFileError):
        return on_fault(Fault(*subject, section, path.name, str(error)), path)
    counters.add("io_errors")
    failure = store_error("read", path, error)
    if error.errno in _TRANSIENT:
        return failure
    missing = isinstance(error, FileNotFoundError)
    movable = not missing and error.errno not in _NOT_OURS
    return on_fault(Fault(*subject, section, path.name, str(failure), missing, movable), path)


def _identity_of(path: Path) -> tuple[int, int, int]:
    try:
        stat = os.stat(path)
    except OSError:
        return (-1, -1, -1)
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
