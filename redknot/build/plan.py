"""What a build will do, before anything is evaluated or written: what is there, what is missing, the bytes it takes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from redknot.artifact.certificate import CertificateDraft
from redknot.artifact.rows import ArtifactRow, ArtifactState
from redknot.artifact.schema import CATALOGUE_FILE, need_is_sharded
from redknot.artifact.store import ArtifactStore
from redknot.build.contents import Content
from redknot.build.target import Target
from redknot.errors import StoreError

OnContent = Callable[[Content], None]


@dataclass(frozen=True)
class Present:
    """A content that an artifact of the store covers already."""

    content: Content
    artifact_id: str


@dataclass(frozen=True)
class BuildPlan:
    """Everything that is known before the first forward."""

    target: Target
    store: Path
    present: tuple[Present, ...]
    missing: tuple[Content, ...]
    planned_bytes: int  # on disk, of what is missing
    free_bytes: int  # where the store is or will be

    @property
    def total(self) -> int:
        """Distinct contents."""
        return len(self.present) + len(self.missing)

    @property
    def missing_tokens(self) -> int:
        """Tokens to evaluate."""
        return sum(map(len, self.missing))

    def check_space(self) -> None:
        """Raise StoreError, with both numbers, when the disk cannot hold what is missing."""
        if self.planned_bytes > self.free_bytes:
            raise StoreError(
                f"not enough space for {self.store}: {self.planned_bytes} bytes are needed, {self.free_bytes} are "
                "free; nothing was built"
            )


def is_store(path: Path) -> bool:
    """Whether there is a store to look into; a plan never makes one.

    An empty catalogue is what a build that was killed at its first step leaves: the next one goes on from there.
    """
    file = path / CATALOGUE_FILE
    return file.is_file() and file.stat().st_size > 0


def plan_build(
    target: Target,
    store: Path,
    contents: Sequence[Content],
    draft: CertificateDraft | None,
    *,
    checked: bool = True,
    on_content: OnContent = lambda content: None,
) -> BuildPlan:
    """Split contents into those that are there and the rest.

    ``draft`` is None where there is no store yet. With ``checked`` every byte of what is there is read, and damage is
    quarantined; without, nothing is written at all.
    """
    present: list[Present] = []
    missing: list[Content] = []
    if draft is None:
        missing += contents
    else:
        with ArtifactStore(store) as opened:
            for content in contents:
                found = find_present(opened, draft, content, checked=checked)
                if found is None:
                    missing.append(content)
                else:
                    present.append(found)
                on_content(content)
    needed = sum(target.nbytes(len(content)) for content in missing)
    return BuildPlan(target, store, tuple(present), tuple(missing), needed, _free_bytes(store))


def find_present(store: ArtifactStore, draft: CertificateDraft, content: Content, *, checked: bool) -> Present | None:
    """The artifact that makes building a content unnecessary; with ``checked`` its every byte is read first.

    A damaged one goes to quarantine and is built again.
    """
    for row in _covering(store, draft, content):
        if not checked or not any(result.problems for result in store.verify(row.artifact_id, row.namespace)):
            return Present(content, row.artifact_id)
    return None


def record_names(store: ArtifactStore, present: Present, namespace: str) -> None:
    """Give an artifact the names of a content that it lacks."""
    missing = set(present.content.names) - set(store.names(present.artifact_id, namespace))
    if missing:
        store.add_names(present.artifact_id, namespace, sorted(missing))


def _covering(store: ArtifactStore, draft: CertificateDraft, content: Content) -> tuple[ArtifactRow, ...]:
    """The usable artifacts that hold at least what a build would make of a content."""
    rows = store.catalogue.rows(draft.namespace, token_hash=content.token_hash, model=draft.model.digest)
    sharded = any(need_is_sharded(need) for need in draft.needs)

    def covers(row: ArtifactRow) -> bool:
        return set(draft.needs) <= set(row.needs) and (not sharded or row.world == draft.world)

    return tuple(row for row in rows if row.state is ArtifactState.READY and covers(row))


def _free_bytes(store: Path) -> int:
    path = store.absolute()
    while not path.is_dir():
        path = path.parent
    return shutil.disk_usage(path).free
