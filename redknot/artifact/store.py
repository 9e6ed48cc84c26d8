"""The artifact store: publish, find, load, remove, and keep in order."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from redknot.artifact.catalogue import put_names
from redknot.artifact.certificate import Certificate
from redknot.artifact.counters import Counters
from redknot.artifact.creation import open_catalogue
from redknot.artifact.files import store_error
from redknot.artifact.identity import ModelIdentity
from redknot.artifact.loaded import LoadedArtifact
from redknot.artifact.maintenance import (
    Finding,
    GcReport,
    StoreBytes,
    collect_garbage,
    count_bytes,
    examine,
    remove_empty,
)
from redknot.artifact.needs import lacking, stored_windows
from redknot.artifact.publish import Publication, publish_many
from redknot.artifact.reader import Reader, VerifyResult
from redknot.artifact.reasons import StaleGenerationError
from redknot.artifact.rows import ArtifactRow, ArtifactState, QuarantineRow, TokenRow
from redknot.artifact.schema import check_artifact_id, need_is_sharded, object_dir
from redknot.artifact.temporary import delete_tree, directory_bytes, move_to_trash
from redknot.errors import CorruptSectionError, StoreError

GRACE_S = 3600.0  # superseded generations stay this long for readers that found them, quarantined files for people
TEMPORARY_AGE_S = 86400.0  # a temporary directory of another machine counts as abandoned after this
_TOUCH_BATCH = 256  # uses recorded in one transaction

_log = logging.getLogger(__name__)


class ArtifactStore:
    """A directory of artifacts. Any number of processes and threads may publish, read and gc at the same time."""

    def __init__(self, path: str | os.PathLike[str], *, create: bool = False) -> None:
        """Open a store, or make one with ``create``; StoreError when the path is no store or a newer one.

        A store that this user cannot write is opened for reading.
        """
        self.root = Path(path).absolute()
        self.catalogue = open_catalogue(self.root, create=create)
        self.counters = Counters()
        self._reader = Reader(self.root, self.catalogue, self.counters)
        self._lock = threading.Lock()
        self._used: dict[str, float] = {}

    def publish_many(self, items: Iterable[Publication]) -> tuple[Certificate, ...]:
        """Publish documents in one transaction, all or none; errors as ``publish.publish_many``."""
        return publish_many(self.root, self.catalogue, self.counters, items)

    def load(self, artifact_id: str, namespace: str) -> LoadedArtifact:
        """Return the current generation of an artifact of this namespace.

        StoreError when this namespace has none (whether another has it is not told); CorruptSectionError when it
        is in quarantine or its certificate is damaged; LayoutVersionError for another layout.
        """
        check_artifact_id(artifact_id)
        try:
            artifact = self._load(artifact_id, namespace)
        except StoreError:
            self.counters.add("load_failures")
            raise
        self.counters.add("loads")
        self._touch(artifact_id)
        return artifact

    def _load(self, artifact_id: str, namespace: str) -> LoadedArtifact:
        for _ in range(8):
            row = self._row(artifact_id, namespace)
            if row.state is not ArtifactState.READY:
                raise CorruptSectionError(f"artifact {artifact_id[:12]} is in quarantine: build it again")
            try:
                return self._reader.open(row)
            except StaleGenerationError:
                # Replaced and collected between the two looks: the newer one is there.
                continue
        raise StaleGenerationError(f"artifact {artifact_id[:12]} is replaced faster than it can be opened")

    def _row(self, artifact_id: str, namespace: str) -> ArtifactRow:
        row = self.catalogue.row(artifact_id, namespace)
        if row is None:
            raise StoreError(f"no artifact {artifact_id[:12]} in namespace {namespace!r}")
        return row

    def _touch(self, artifact_id: str) -> None:
        with self._lock:
            self._used[artifact_id] = time.time()
            full = len(self._used) >= _TOUCH_BATCH
        if full:
            self.flush_usage(wait_s=0.0)

    def flush_usage(self, wait_s: float = 5.0) -> None:
        """Write when artifacts were last used; a store that cannot be written now is logged, not an error."""
        with self._lock:
            used, self._used = self._used, {}
        try:
            if used:
                self.catalogue.touch(used, wait_s)
        except StoreError as error:
            _log.warning("last-used times of %d artifacts were not recorded: %s", len(used), error)

    def list(self, namespace: str | None = None) -> tuple[ArtifactRow, ...]:
        """Return all artifacts of a namespace (None: every namespace), in quarantine or not, oldest first."""
        return self.catalogue.rows(namespace)

    def tokens(
        self,
        namespace: str,
        model: ModelIdentity,
        *,
        needs: Sequence[str] = (),
        world: int = 1,
        known: Mapping[str, TokenRow] | None = None,
    ) -> tuple[TokenRow, ...]:
        """Return the token ids of every document that a request of this model may match, one row per content.

        Of several artifacts with the same tokens, one that covers ``needs`` (and ``world``, where they are
        sharded) comes before one that does not, then one with all window rows (it serves parts of the document too) or
        with fewer to compute again (``Windows.rank``), then the smaller. Whether the one returned does is for
        ``validate``.
        One whose token ids are damaged is left out and goes to quarantine; the others stay in service. Token ids
        of ``known`` artifacts (by id, from an earlier call) are not read again.
        """
        known = known or {}
        sharded = any(need_is_sharded(need) for need in needs)

        def rank(row: ArtifactRow) -> tuple[bool, int, int]:
            covers = not lacking(needs, row.needs) and (not sharded or row.world == world)
            return (not covers, stored_windows(row.needs).rank, row.nbytes)

        best: dict[str, TokenRow] = {}
        for row in self.catalogue.rows(namespace, model=model.digest):
            if row.state is not ArtifactState.READY:
                continue
            try:
                seen = known.get(row.artifact_id)
                same = seen is not None and seen.artifact.generation == row.generation
                found = TokenRow(row, seen.token_ids) if same and seen is not None else self._reader.tokens(row)
            except (CorruptSectionError, StaleGenerationError):
                continue
            other = best.get(row.token_hash)
            if other is None or rank(row) < rank(other.artifact):
                best[row.token_hash] = found
        return tuple(best.values())

    @property
    def revision(self) -> tuple[int, int]:
        """Equal only while the catalogue is the same one and unchanged: what a matcher's index is keyed with."""
        return self.catalogue.revision

    def names(self, artifact_id: str, namespace: str) -> tuple[str, ...]:
        """Return the document names of an artifact, sorted."""
        return self.catalogue.names(namespace, artifact_id)

    def add_names(self, artifact_id: str, namespace: str, names: Iterable[str]) -> None:
        """Give an artifact more document names; StoreError when this namespace has no such artifact."""
        with self.catalogue.write() as connection:
            put_names(connection, self._row(artifact_id, namespace), names)

    def identities(self, namespace: str) -> tuple[ModelIdentity, ...]:
        """Return the models that a namespace has artifacts of; ``identity.differences`` names what a miss is due to."""
        return self.catalogue.identities(namespace)

    def quarantined(self, artifact_id: str | None = None) -> tuple[QuarantineRow, ...]:
        """Return what is in quarantine, oldest first."""
        return self.catalogue.quarantined(artifact_id)

    def remove(self, artifact_id: str, namespace: str) -> int:
        """Remove an artifact with all its generations and names, and return the bytes freed.

        StoreError when this namespace has no such artifact or the disk refuses. What was read before stays valid.
        """
        check_artifact_id(artifact_id)
        directory = object_dir(self.root, artifact_id)
        trash: Path | None = None
        try:
            with self.catalogue.write() as connection:
                self._row(artifact_id, namespace)
                connection.execute("DELETE FROM artifacts WHERE artifact_id = ?", (artifact_id,))
                connection.execute("DELETE FROM quarantined WHERE artifact_id = ?", (artifact_id,))
                if directory.is_dir():
                    trash = move_to_trash(self.root, directory)
                    remove_empty(directory)
        except OSError as error:
            raise store_error("remove", directory, error) from error
        if trash is None:
            return 0
        nbytes = directory_bytes(trash)
        delete_tree(trash)
        return nbytes

    def gc(self, *, grace_s: float = GRACE_S, temporary_age_s: float = TEMPORARY_AGE_S) -> GcReport:
        """Remove what no reader can find any more; what that is, and errors: ``collect_garbage``."""
        report = collect_garbage(self.root, self.catalogue, grace_s=grace_s, temporary_age_s=temporary_age_s)
        self.counters.add("gc_directories_removed", report.temporary + report.superseded + report.orphaned)
        self.counters.add("gc_files_removed", report.quarantined)
        return report

    def verify(self, artifact_id: str | None = None, namespace: str | None = None) -> tuple[VerifyResult, ...]:
        """Read one artifact, or all, completely, ignoring what was verified before.

        What is damaged goes to quarantine; an artifact in quarantine that turns out sound is back in service.
        """
        rows = self.catalogue.rows(namespace, artifact_id=artifact_id)
        if artifact_id is not None and not rows:
            raise StoreError(f"no artifact {artifact_id[:12]} to verify")
        return tuple(self._reader.verify(row) for row in rows)

    def doctor(self) -> tuple[Finding, ...]:
        """Compare catalogue and files, permissions and free space, without reading payloads; empty when all is well."""
        return examine(self.root, self.catalogue, temporary_age_s=TEMPORARY_AGE_S)

    def bytes_on_disk(self) -> StoreBytes:
        """Count the store's files on disk."""
        return count_bytes(self.root, self.catalogue.path)

    def close(self) -> None:
        """Record usage and close the catalogue; artifacts already loaded stay valid."""
        self.flush_usage()
        self._reader.forget()
        self.catalogue.close()

    def __enter__(self) -> ArtifactStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
