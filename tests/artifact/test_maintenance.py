"""gc removes what nobody can find and nothing else; doctor names what is wrong."""

import os
import shutil
from pathlib import Path

import pytest

from redknot.artifact import maintenance
from redknot.artifact.schema import generation_dir
from redknot.artifact.store import ArtifactStore
from redknot.artifact.temporary import make_temporary
from tests.artifact.kit import NAMESPACE, TOKEN_DAMAGE, TOKENS, alter_tokens, draft, publish, run_child, sections


def codes(store: ArtifactStore) -> list[str]:
    return sorted(finding.code for finding in store.doctor())


def test_temporary_directories(store: ArtifactStore, root: Path) -> None:
    mine = make_temporary(root)
    assert run_child(lambda: (make_temporary(root) / "x").write_bytes(bytes(1000))) == 0
    foreign = root / "tmp" / ("f" * 16 + ".1.1.abc")
    foreign.mkdir()
    reused_pid = root / "tmp" / f"{mine.name.split('.')[0]}.{os.getpid()}.1.abc"
    reused_pid.mkdir()
    (root / "tmp" / "trash-1").mkdir()
    assert codes(store) == ["abandoned_temporary"] * 3
    report = store.gc()
    assert (report.temporary, report.nbytes) == (3, 1000)
    assert sorted(path.name for path in (root / "tmp").iterdir()) == sorted([mine.name, foreign.name])
    os.utime(foreign, (0, 0))
    assert store.gc().temporary == 1
    assert mine.exists()
    assert store.counters["gc_directories_removed"] == 4


def test_superseded_and_orphaned_generations(store: ArtifactStore, root: Path) -> None:
    certificate = publish(store, draft(), sections(), TOKENS)
    publish(store, draft(), sections(), TOKENS)
    first = generation_dir(root, certificate.artifact_id, 1)
    shutil.copytree(first, generation_dir(root, "ab" * 32, 1))
    shutil.copytree(first, generation_dir(root, certificate.artifact_id, 3))
    assert codes(store) == ["orphan", "superseded", "superseded"]
    assert store.gc().superseded == 0
    report = store.gc(grace_s=0)
    assert (report.superseded, report.orphaned, report.temporary) == (1, 2, 0)
    assert codes(store) == []
    assert store.verify()[0].problems == ()
    assert store.bytes_on_disk().objects == store.list()[0].nbytes
    assert not (root / "objects" / "ab").exists()
    # A directory that is not in the catalogue is never taken over.
    shutil.copytree(generation_dir(root, certificate.artifact_id, 2), generation_dir(root, certificate.artifact_id, 7))
    assert publish(store, draft(), sections(), TOKENS).generation == 8


def test_doctor_names_what_is_wrong(store: ArtifactStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = generation_dir(root, publish(store, draft(), sections(), TOKENS).artifact_id, 1)
    assert codes(store) == []
    (directory / "notes.txt").write_text("x")
    assert codes(store) == ["file_unknown", "size_mismatch"]
    (directory / "notes.txt").unlink()
    (directory / "boundary.safetensors").rename(root / "x")
    assert codes(store) == ["file_missing"]
    (root / "x").rename(directory / "boundary.safetensors")
    (directory / "certificate.json").write_text("{}")
    assert codes(store) == ["certificate_invalid"]
    (directory / "certificate.json").unlink()
    assert codes(store) == ["certificate_unreadable"]
    shutil.rmtree(directory)
    assert codes(store) == ["certificate_unreadable"]
    (root / "quarantine").rmdir()
    assert codes(store) == ["certificate_unreadable", "directory_missing"]
    monkeypatch.setattr(maintenance.os, "access", lambda *_: False)
    assert codes(store).count("permission") == 3
    usage = shutil.disk_usage(root)
    monkeypatch.setattr(maintenance.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "low_space" in codes(store)


@pytest.mark.parametrize("damage", TOKEN_DAMAGE)
def test_doctor_sees_damaged_token_ids(store: ArtifactStore, root: Path, damage: str) -> None:
    """Without moving anything: that is for verify and the reader."""
    sound = publish(store, draft(), sections(), [1, 2])
    certificate = publish(store, draft(), sections(), TOKENS)
    alter_tokens(root, certificate.artifact_id, TOKEN_DAMAGE[damage])
    for _ in range(2):
        [finding] = store.doctor()
        assert (finding.severity, finding.code) == ("error", "tokens_damaged")
        assert certificate.artifact_id in finding.path
        assert store.quarantined() == ()
    (generation_dir(root, certificate.artifact_id, 1) / "certificate.json").unlink()
    assert codes(store) == ["certificate_unreadable", "tokens_damaged"]
    store.remove(certificate.artifact_id, NAMESPACE)
    assert store.doctor() == ()
    assert store.list()[0].artifact_id == sound.artifact_id


def test_doctor_reports_quarantine(store: ArtifactStore, root: Path) -> None:
    certificate = publish(store, draft(), sections(), TOKENS)
    (generation_dir(root, certificate.artifact_id, 1) / "zl.0-2.r0of1.safetensors").write_bytes(b"")
    store.verify()
    assert codes(store) == ["quarantined"]
    store.remove(certificate.artifact_id, NAMESPACE)
    assert codes(store) == []
    assert store.quarantined() == ()


def quarantine(store: ArtifactStore, token: int) -> str:
    """Publish a document and damage it; returns its artifact id."""
    certificate = publish(store, draft(), sections(), [token])
    path = generation_dir(store.root, certificate.artifact_id, 1) / "boundary.safetensors"
    path.write_bytes(b"x" * 1000)
    assert store.verify(certificate.artifact_id)[0].problems
    return certificate.artifact_id


def test_quarantined_files(store: ArtifactStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay for the grace period, unless their artifact is gone; the record of the fault outlives them."""
    removed, kept = quarantine(store, 1), quarantine(store, 2)
    store.remove(removed, NAMESPACE)
    report = store.gc()
    assert (report.quarantined, report.nbytes) == (1, 1000)
    [left] = (root / "quarantine").iterdir()
    assert left.name == store.quarantined(kept)[0].moved_to
    at = store.quarantined(kept)[0].at
    monkeypatch.setattr(maintenance.time, "time", lambda: at + 99.0)
    assert store.gc(grace_s=100).quarantined == 0
    report = store.gc(grace_s=99)
    assert (report.quarantined, report.nbytes) == (1, 1000)
    assert list((root / "quarantine").iterdir()) == []
    assert store.bytes_on_disk().quarantine == 0
    assert [(fault.artifact_id, fault.moved_to) for fault in store.quarantined()] == [(kept, "")]
    assert codes(store) == ["quarantined"]
    assert store.counters["gc_files_removed"] == 2
    (root / "quarantine").rmdir()
    assert store.gc(grace_s=0).quarantined == 0


def test_books(store: ArtifactStore, root: Path) -> None:
    for number in range(3):
        publish(store, draft(), sections(), [number])
    size = store.bytes_on_disk()
    assert size.objects == sum(row.nbytes for row in store.list())
    assert size.total == size.objects + size.catalogue
    assert size.catalogue >= (root / "catalogue.sqlite").stat().st_size
