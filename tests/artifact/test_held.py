"""What an open store holds while its files change, shrink, vanish or are replaced: no signal, no wait, no old news."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from redknot.artifact.store import ArtifactStore
from redknot.errors import CorruptSectionError, StoreError
from tests.artifact.kit import (
    NAMESPACE,
    TOKENS,
    directory_of,
    draft,
    find,
    flip,
    model,
    offset_of,
    publish,
    read_all,
    read_sections,
    sections,
)


@pytest.mark.parametrize("size", [0, 100, 4096])
def test_a_file_that_shrinks_while_it_is_held(store: ArtifactStore, size: int) -> None:
    """Were it mapped, the process would end with SIGBUS."""
    certificate = publish(store, draft(), sections(1.0, rows=3000), TOKENS)
    path = directory_of(store, certificate) / "boundary.safetensors"
    held = store.load(certificate.artifact_id, NAMESPACE)
    kept = held.section("boundary.streams")
    again = store.load(certificate.artifact_id, NAMESPACE)
    os.truncate(path, size)
    # What was verified is still what is used.
    assert kept.unique().tolist() == [1.0]
    assert held.section("boundary.streams") is kept
    with pytest.raises(CorruptSectionError, match=r"boundary\.streams in boundary\.safetensors"):
        again.section("boundary.streams")
    assert store.counters["files_quarantined"] == 1
    assert find(store) == ()


def test_bytes_changed_under_a_verified_artifact(store: ArtifactStore) -> None:
    """Size, inode and mtime are as before: only reading tells."""
    certificate = publish(store, draft(), sections(1.0), TOKENS)
    path = directory_of(store, certificate) / "boundary.safetensors"
    held = store.load(certificate.artifact_id, NAMESPACE)
    kept = read_sections(held)
    before = path.stat()
    flip(path, offset_of(path, "boundary.streams"))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert all(tensor.unique().tolist() == [1.0] for tensor in [*kept.values(), *read_sections(held).values()])
    with pytest.raises(CorruptSectionError, match="do not match their checksum"):
        read_all(store, certificate)
    assert find(store) == ()


def test_a_certificate_changed_under_a_hot_one(store: ArtifactStore) -> None:
    certificate = publish(store, draft(), sections(), TOKENS)
    store.load(certificate.artifact_id, NAMESPACE)
    path = directory_of(store, certificate) / "certificate.json"
    store.load(certificate.artifact_id, NAMESPACE)
    assert store.counters["hot_loads"] == 1
    flip(path, path.read_bytes().index(b"token_count") + 15)
    with pytest.raises(CorruptSectionError, match="certificate"):
        store.load(certificate.artifact_id, NAMESPACE)


@pytest.mark.parametrize("file", ["boundary.safetensors", "certificate.json"])
@pytest.mark.parametrize("replace", [os.mkfifo, os.mkdir])
def test_what_is_no_file_in_place_of_one(store: ArtifactStore, file: str, replace: object) -> None:
    """Neither waited for nor moved: it is in nobody's way."""
    certificate = publish(store, draft(), sections(), TOKENS)
    path = directory_of(store, certificate) / file
    path.unlink()
    replace(path)
    assert [finding.code for finding in store.doctor()] != []
    with pytest.raises(CorruptSectionError, match=f"in {file}: .* not a regular file.; quarantined"):
        read_all(store, certificate)
    assert store.counters["files_quarantined"] == 0
    assert find(store) == ()
    assert len(store.verify(certificate.artifact_id)[0].problems) == 1
    assert len(read_all(store, publish(store, draft(), sections(), TOKENS))) == len(certificate.sections)


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("replace", [os.mkfifo, os.mkdir])
def test_what_is_no_file_in_place_of_a_catalogue(root: Path, create: bool, replace: object) -> None:
    root.mkdir()
    replace(root / "catalogue.sqlite")
    with pytest.raises(StoreError, match="is not an artifact store"):
        ArtifactStore(root, create=create)


def test_a_catalogue_that_becomes_a_fifo(store: ArtifactStore, root: Path) -> None:
    (root / "catalogue.sqlite").unlink()
    os.mkfifo(root / "catalogue.sqlite")
    with pytest.raises(StoreError, match=r"catalogue\.sqlite is not a regular file"):
        store.list()


def test_one_problem_for_each_damaged_file(store: ArtifactStore) -> None:
    """Its other sections went to quarantine with it, and are no faults of their own."""
    certificate = publish(store, draft(), sections(), TOKENS)
    path = directory_of(store, certificate) / "latents.0-2.safetensors"
    flip(path, offset_of(path, "layers.1.entries"))
    [problem] = store.verify(certificate.artifact_id)[0].problems
    assert "layers.1.entries in latents.0-2.safetensors" in problem
    assert [fault.section for fault in store.quarantined()] == ["layers.1.entries"]


def test_a_store_built_again_while_it_is_open(store: ArtifactStore, root: Path) -> None:
    """As many changes as before, the same content and another: the new store answers."""
    old = publish(store, draft(), sections(1.0), TOKENS)
    known = {row.artifact.artifact_id: row for row in store.tokens(NAMESPACE, model())}
    assert read_all(store, old)["boundary.streams"].unique().tolist() == [1.0]
    before = store.revision
    shutil.rmtree(root)
    with ArtifactStore(root, create=True) as builder:
        publish(builder, draft(), sections(2.0), TOKENS)
        assert builder.revision[1] == before[1]
        assert store.revision != before
        other = publish(builder, draft(), sections(3.0), [1, 2, 3])
    assert {row.artifact.token_count for row in store.tokens(NAMESPACE, model(), known=known)} == {len(TOKENS), 3}
    assert read_all(store, old)["boundary.streams"].unique().tolist() == [2.0]
    assert read_all(store, other)["boundary.streams"].unique().tolist() == [3.0]
    publish(store, draft(), sections(4.0), [4])
    with ArtifactStore(root) as reader:
        assert [row.token_count for row in reader.list()] == [len(TOKENS), 3, 1]


def test_a_store_deleted_while_it_is_open(store: ArtifactStore, root: Path) -> None:
    certificate = publish(store, draft(), sections(), TOKENS)
    shutil.rmtree(root)
    for use in (store.list, lambda: store.revision, lambda: store.load(certificate.artifact_id, NAMESPACE)):
        with pytest.raises(StoreError, match=r"catalogue\.sqlite is gone: build the store again"):
            use()
    ArtifactStore(root, create=True).close()
    assert store.list() == ()


def test_a_store_of_another_version_in_its_place(store: ArtifactStore, root: Path) -> None:
    publish(store, draft(), sections(), TOKENS)
    (root / "catalogue.sqlite").unlink()
    (root / "catalogue.sqlite").write_bytes(b"")
    with pytest.raises(StoreError, match="not a RedKnot catalogue"):
        store.list()


def test_a_store_replaced_while_it_is_written(store: ArtifactStore, root: Path) -> None:
    """Nothing reaches the new store, and nobody believes it did."""
    with ArtifactStore(root.with_name("other"), create=True) as other:
        publish(other, draft(), sections(), [1])
    with pytest.raises(StoreError, match="replaced while it was written"), store.catalogue.write() as connection:  # noqa: PT012
        connection.execute("DELETE FROM artifacts")
        shutil.rmtree(root)
        root.with_name("other").rename(root)
        assert store.list() == ()
    assert [row.token_count for row in store.list()] == [1]


def test_sections_have_memory_of_their_own(store: ArtifactStore) -> None:
    certificate = publish(store, draft(), sections(1.0), TOKENS)
    first, second = (store.load(certificate.artifact_id, NAMESPACE).section("boundary.streams") for _ in range(2))
    first.zero_()
    assert torch.equal(second, torch.ones_like(second))
