"""One artifact opened for reading: every section is verified when it is read into memory."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from redknot.artifact.certificate import Certificate, parse_certificate
from redknot.artifact.counters import Counters
from redknot.artifact.files import (
    byte_view,
    checksum,
    read_section,
    read_sections_table,
    read_small,
    store_error,
)
from redknot.artifact.reasons import MalformedFileError, MissingSectionError
from redknot.artifact.schema import CERTIFICATE_FILE
from redknot.errors import CorruptSectionError, StoreError
from redknot.model.tensorfile import StoredTensor

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

    Sections are read from disk, never mapped, and kept for as long as this object lives: what was verified is what
    is used, whatever becomes of the files. Tensors are shared and must be treated as read only.
    """

    def __init__(
        self, certificate: Certificate, directory: Path, *, counters: Counters, on_fault: FaultHandler
    ) -> None:
        self.certificate = certificate
        self.directory = directory
        self._counters = counters
        self._on_fault = on_fault
        self._files: dict[str, dict[str, StoredTensor]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._failed: dict[str, str] = {}

    def section(self, name: str) -> torch.Tensor:
        """Return one section, shape and dtype as in the certificate; errors as ``read``, the same each time."""
        if name in self._failed:
            raise CorruptSectionError(self._failed[name])
        if name not in self._tensors:
            try:
                self._tensors[name] = self.read(name)
            except CorruptSectionError as error:
                self._failed[name] = str(error)
                raise
        return self._tensors[name]

    def read(self, name: str) -> torch.Tensor:
        """Read one section from disk and compare its checksum; nothing is kept.

        MissingSectionError when the certificate does not list it; CorruptSectionError when its file is gone,
        unreadable, malformed or damaged (it is then in quarantine); StaleGenerationError when the file is gone
        because the generation was replaced; StoreError when this process is out of memory or descriptors.
        """
        record = self.certificate.sections.get(name)
        if record is None:
            raise MissingSectionError(f"artifact {self.certificate.artifact_id[:12]} has no section {name[:80]}")
        try:
            tensor = read_section(self._table(record.file)[name])
            if checksum(byte_view(tensor)) != record.checksum:
                raise MalformedFileError(f"its {record.nbytes} bytes do not match their checksum")
        except (OSError, MalformedFileError) as error:
            path = self.directory / record.file
            raise read_failure(self.certificate, name, path, error, self._counters, self._on_fault) from error
        self._counters.add("sections_verified")
        self._counters.add("bytes_verified", record.nbytes)
        return tensor

    def _table(self, file: str) -> dict[str, StoredTensor]:
        """Where the sections of one file lie, as its header says and the certificate declares."""
        if file not in self._files:
            table = read_sections_table(self.directory / file)
            found = {name: (tensor.dtype, tensor.shape) for name, tensor in table.items()}
            sections = self.certificate.sections.items()
            declared = {name: (record.dtype, record.shape) for name, record in sections if record.file == file}
            if found != declared:
                raise MalformedFileError(f"{file} holds other sections, dtypes or shapes than its certificate declares")
            self._files[file] = table
        return self._files[file]


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
