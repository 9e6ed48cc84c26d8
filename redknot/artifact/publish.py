"""Publication: files are written aside, made durable, renamed into place and then catalogued in one transaction."""

from __future__ import annotations

import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from redknot.artifact.catalogue import Catalogue, generation_of, put_artifact, put_names
from redknot.artifact.certificate import Certificate, CertificateDraft, SectionRecord
from redknot.artifact.counters import Counters
from redknot.artifact.files import WrittenTensor, store_error, write_new, write_safetensors
from redknot.artifact.header import TensorSpec, file_bytes, tensor_bytes
from redknot.artifact.identity import TokenIds, artifact_id_of, token_array, token_hash
from redknot.artifact.rows import ArtifactRow, ArtifactState
from redknot.artifact.schema import (
    CERTIFICATE_FILE,
    LAYOUT_VERSION,
    Section,
    generation_dir,
    object_dir,
    parse_generation,
    parse_section,
    sections_by_file,
)
from redknot.artifact.temporary import delete_tree, directory_bytes, make_temporary
from redknot.durable import sync_folder
from redknot.errors import StoreError

_CERTIFICATE_BYTES = 390  # of a certificate without model, needs and sections: the keys, two hashes, the numbers
_RECORD_BYTES = 115  # of one section record without its strings and numbers: the keys and the checksum


@dataclass(frozen=True)
class Publication:
    """One document to publish: every section as a tensor, the token ids [n], and the names it goes by."""

    draft: CertificateDraft
    sections: Mapping[str, torch.Tensor]
    token_ids: TokenIds
    names: Sequence[str] = ()


@dataclass(frozen=True)
class _Staged:
    directory: Path
    certificate: Certificate
    token_ids: bytes
    names: tuple[str, ...]


def publish_many(
    root: Path, catalogue: Catalogue, counters: Counters, items: Iterable[Publication]
) -> tuple[Certificate, ...]:
    """Publish several documents in one transaction: all become visible, or none.

    Items are taken one at a time, so a generator keeps only one document's tensors alive. StoreError with file,
    errno and reason when the disk refuses, or for sections that do not fit the draft; InputError for bad token
    ids. In every case, an interrupt included, what was written is removed.
    """
    staged: list[_Staged] = []
    directories: list[Path] = []
    try:
        for item in items:
            directories.append(make_temporary(root))
            staged.append(_stage(root, directories[-1], item))
        certificates = _commit(root, catalogue, staged)
    except OSError as error:
        counters.add("publish_failures")
        raise store_error("write", root, error) from error
    except StoreError:
        counters.add("publish_failures")
        raise
    finally:
        for directory in directories:
            delete_tree(directory)
    counters.add("published", len(staged))
    counters.add("bytes_written", sum(certificate.nbytes for certificate in certificates))
    return certificates


def planned_bytes(draft: CertificateDraft, specs: Mapping[str, TensorSpec]) -> int:
    """Return the bytes on disk that sections of these dtypes and shapes will take; exact but for a few digits."""
    total = _CERTIFICATE_BYTES + len(draft.model.model_dump_json()) + len(draft.namespace)
    total += sum(len(need) + 3 for need in draft.needs)
    for file, names in sections_by_file(specs, draft.layer_group).items():
        total += file_bytes({name: specs[name] for name in names})
        for name in names:
            dtype, shape = specs[name]
            total += _RECORD_BYTES + len(name) + len(file) + len(dtype)
            total += len(str(list(shape))) + len(str(tensor_bytes(specs[name])))
    return total


def _stage(root: Path, directory: Path, item: Publication) -> _Staged:
    draft = item.draft
    tokens = token_array(item.token_ids)
    _check_draft(draft, [parse_section(name) for name in item.sections])
    records: dict[str, SectionRecord] = {}
    for file, names in sections_by_file(item.sections, draft.layer_group).items():
        written = write_safetensors(directory / file, {name: item.sections[name] for name in names})
        records |= {name: _record(file, parse_section(name), one) for name, one in written.items()}
    needs = tuple(sorted(set(draft.needs)))
    hashed = token_hash(tokens)
    identifier = artifact_id_of(draft.namespace, draft.model.digest, hashed, needs, world=draft.world)
    try:
        certificate = Certificate(
            layout_version=LAYOUT_VERSION,
            artifact_id=identifier,
            namespace=draft.namespace,
            model=draft.model,
            token_count=len(tokens),
            token_hash=hashed,
            needs=needs,
            world=draft.world,
            layer_group=draft.layer_group,
            generation=_last_generation(root, identifier) + 1,
            created=time.time(),
            sections=dict(sorted(records.items())),
        )
    except ValidationError as error:
        raise StoreError(f"cannot certify the artifact: {error.errors(include_url=False)[0]['msg']}") from error
    write_new(directory / CERTIFICATE_FILE, [certificate.to_json()])
    sync_folder(directory)
    return _Staged(directory, certificate, tokens.tobytes(), tuple(item.names))


def _check_draft(draft: CertificateDraft, sections: Sequence[Section]) -> None:
    if not draft.namespace:
        raise StoreError("an artifact needs a namespace")
    if draft.layer_group < 1:
        raise StoreError(f"layer_group must be at least 1, not {draft.layer_group}")
    shards: defaultdict[tuple[int | None, str], set[tuple[int | None, int | None]]] = defaultdict(set)
    for section in sections:
        if section.world is not None:
            shards[section.layer, section.kind].add((section.rank, section.world))
    whole = {(rank, draft.world) for rank in range(draft.world)}
    for (layer, kind), found in shards.items():
        if found != whole:
            raise StoreError(
                f"layers.{layer}.{kind} needs the shards of all {draft.world} ranks, found {sorted(found)}"
            )
    if draft.world > 1 and not shards:
        raise StoreError(f"nothing is sharded, so the artifact serves any TP size: world must be 1, not {draft.world}")


def _record(file: str, section: Section, written: WrittenTensor) -> SectionRecord:
    channels = None
    if section.rank is not None and written.shape:
        width = written.shape[-1]
        channels = (section.rank * width, (section.rank + 1) * width)
    return SectionRecord(
        file=file,
        dtype=written.dtype,
        shape=written.shape,
        nbytes=written.nbytes,
        checksum=written.checksum,
        channels=channels,
    )


def _commit(root: Path, catalogue: Catalogue, staged: Sequence[_Staged]) -> tuple[Certificate, ...]:
    moved: list[Path] = []
    try:
        with catalogue.write() as connection:
            return _install(root, connection, staged, moved)
    except (OSError, StoreError):
        # The transaction is rolled back, and nobody else takes over a generation that was not catalogued. After an
        # interrupt the commit may have happened: then the directories stay, and gc removes them if it did not.
        for directory in moved:
            delete_tree(directory)
        raise


def _install(
    root: Path, connection: sqlite3.Connection, staged: Sequence[_Staged], moved: list[Path]
) -> tuple[Certificate, ...]:
    certificates: list[Certificate] = []
    for one in staged:
        certificate = one.certificate
        identifier = certificate.artifact_id
        generation = max(_last_generation(root, identifier), generation_of(connection, identifier)) + 1
        if generation != certificate.generation:
            # Another builder published this artifact since it was staged.
            certificate = certificate.model_copy(update={"generation": generation})
            (one.directory / CERTIFICATE_FILE).unlink()
            write_new(one.directory / CERTIFICATE_FILE, [certificate.to_json()])
            sync_folder(one.directory)
        target = generation_dir(root, identifier, generation)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(one.directory, target)
        moved.append(target)
        certificates.append(certificate)
    parents = {target.parent for target in moved}
    parents |= {parent.parent for parent in parents} | {parent.parent.parent for parent in parents}
    for parent in sorted(parents):
        sync_folder(parent)
    for one, certificate, target in zip(staged, certificates, moved, strict=True):
        row = _row(certificate, directory_bytes(target))
        put_artifact(connection, row, certificate.model, one.token_ids)
        put_names(connection, row, one.names)
    return tuple(certificates)


def _row(certificate: Certificate, nbytes: int) -> ArtifactRow:
    return ArtifactRow(
        artifact_id=certificate.artifact_id,
        namespace=certificate.namespace,
        model=certificate.model.digest,
        token_hash=certificate.token_hash,
        token_count=certificate.token_count,
        nbytes=nbytes,
        generation=certificate.generation,
        needs=certificate.needs,
        world=certificate.world,
        state=ArtifactState.READY,
        created=certificate.created,
        last_used=certificate.created,
    )


def _last_generation(root: Path, artifact_id: str) -> int:
    try:
        names = os.listdir(object_dir(root, artifact_id))
    except FileNotFoundError:
        return 0
    return max((parse_generation(name) or 0 for name in names), default=0)
