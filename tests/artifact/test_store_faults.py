"""Every fault of a stored file is seen, counted and put aside, and nothing else suffers from it."""

import errno
import os
from pathlib import Path

import pytest

from redknot.artifact import reader
from redknot.artifact.reasons import MissingSectionError
from redknot.artifact.store import ArtifactStore
from redknot.errors import CorruptSectionError, StoreError
from tests.artifact.kit import (
    NAMESPACE,
    TOKEN_DAMAGE,
    TOKENS,
    alter_tokens,
    directory_of,
    draft,
    find,
    flip,
    model,
    offset_of,
    publish,
    read_all,
    sections,
)


def test_a_flipped_bit_in_each_section(root: Path) -> None:
    with ArtifactStore(root, create=True) as store:
        bystander = publish(store, draft(), sections(), [1])
        names = sorted(store.load(bystander.artifact_id, NAMESPACE).certificate.sections)
        for count, name in enumerate(names, start=1):
            certificate = publish(store, draft(), sections(), TOKENS)
            path = directory_of(store, certificate) / certificate.sections[name].file
            flip(path, offset_of(path, name))
            artifact = store.load(certificate.artifact_id, NAMESPACE)
            for other in names:
                if certificate.sections[other].file != path.name:
                    artifact.section(other)
            for _ in range(2):
                with pytest.raises(CorruptSectionError, match=f"{name} in {path.name}.*checksum"):
                    artifact.section(name)
            assert store.counters["corrupt_sections"] == store.counters["files_quarantined"] == count
            assert not path.exists()
            assert store.quarantined()[-1].section == name
            assert (store.root / "quarantine" / store.quarantined()[-1].moved_to).is_file()
            assert find(store, token_ids=TOKENS) == ()
            with pytest.raises(CorruptSectionError, match="in quarantine"):
                store.load(certificate.artifact_id, NAMESPACE)
        # The others are unaffected, and building again is all that is needed.
        assert len(read_all(store, bystander)) == len(names)
        assert len(read_all(store, publish(store, draft(), sections(), TOKENS))) == len(names)


def test_truncation_at_every_page_of_every_file(store: ArtifactStore) -> None:
    certificate = publish(store, draft(), sections(rows=600), TOKENS)
    cuts = 0
    for path in sorted(directory_of(store, certificate).iterdir()):
        whole = path.read_bytes()
        for at in {*range(0, len(whole), 4096), len(whole) - 1}:
            os.truncate(path, at)
            with pytest.raises(CorruptSectionError):
                read_all(store, certificate)
            cuts += 1
            assert store.counters["corrupt_sections"] == store.counters["files_quarantined"] == cuts
            assert find(store) == ()
            # An operator who copies the file back and verifies has the artifact back.
            path.write_bytes(whole)
            assert store.verify(certificate.artifact_id)[0].problems == ()
    assert cuts > 40
    assert len(read_all(store, certificate)) == len(certificate.sections)


def test_a_missing_file_is_refused_never_filled(store: ArtifactStore) -> None:
    for file in ("latents.0-2.safetensors", "zl.3-5.r0of1.safetensors", "boundary.safetensors", "certificate.json"):
        certificate = publish(store, draft(), sections(), TOKENS)
        (directory_of(store, certificate) / file).unlink()
        with pytest.raises(CorruptSectionError, match=f"{file}.*ENOENT"):
            read_all(store, certificate)
        assert store.quarantined()[-1].file == file
    assert store.counters["io_errors"] == 4


def test_a_section_that_was_never_stored(store: ArtifactStore) -> None:
    certificate = publish(store, draft(), sections(), TOKENS)
    with pytest.raises(MissingSectionError):
        store.load(certificate.artifact_id, NAMESPACE).section("layers.9.entries")
    assert store.quarantined() == ()


def test_files_of_another_artifact_are_noticed(store: ArtifactStore) -> None:
    one = publish(store, draft(), sections(), [1])
    two = publish(store, draft(), sections(), [2])
    for file, message in (("certificate.json", "another artifact"), ("boundary.safetensors", "checksum")):
        (directory_of(store, two) / file).write_bytes((directory_of(store, one) / file).read_bytes())
        with pytest.raises(CorruptSectionError, match=message):
            read_all(store, two)
        two = publish(store, draft(), sections(), [2])


def test_a_shard_of_another_rank_is_noticed(store: ArtifactStore) -> None:
    certificate = publish(store, draft(world=2), sections(world=2), TOKENS)
    directory = directory_of(store, certificate)
    (directory / "zl.0-2.r1of2.safetensors").write_bytes((directory / "zl.0-2.r0of2.safetensors").read_bytes())
    artifact = store.load(certificate.artifact_id, NAMESPACE)
    assert artifact.section("layers.0.zl.r0of2").shape == (30, 4)
    with pytest.raises(CorruptSectionError, match="other sections"):
        artifact.section("layers.0.zl.r1of2")


def test_damage_after_the_first_read_is_seen_by_the_next_load(store: ArtifactStore) -> None:
    certificate = publish(store, draft(), sections(), TOKENS)
    read_all(store, certificate)
    path = directory_of(store, certificate) / "boundary.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    with pytest.raises(CorruptSectionError):
        read_all(store, certificate)


@pytest.mark.parametrize(
    ("number", "quarantined", "moved"),
    [(errno.EIO, True, True), (errno.EACCES, True, False), (errno.EMFILE, False, False), (errno.ENOMEM, False, False)],
)
@pytest.mark.parametrize("call", ["open", "pread", "preadv"])
def test_read_errors(root: Path, call: str, number: int, quarantined: bool, moved: bool) -> None:
    with ArtifactStore(root, create=True) as store:
        certificate = publish(store, draft(), sections(), TOKENS)
        artifact = store.load(certificate.artifact_id, NAMESPACE)

        def fail(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(
                StoreError, match=f"boundary.safetensors: errno {number} .{errno.errorcode[number]}"
            ) as e:
                artifact.section("boundary.streams")
        assert isinstance(e.value, CorruptSectionError) == quarantined
        assert store.counters["io_errors"] == 1
        assert store.counters["corrupt_sections"] == quarantined
        assert bool(find(store)) != quarantined
        path = directory_of(store, certificate) / "boundary.safetensors"
        assert path.exists() != moved
        if not quarantined:
            assert artifact.section("boundary.streams").shape == (30, 64)
        if quarantined and not moved:
            # The permission was repaired: verify puts it back into service.
            [result] = store.verify(certificate.artifact_id)
            assert result.problems == ()
            assert len(read_all(store, certificate)) == len(certificate.sections)
            assert store.quarantined() == ()


def test_a_fault_that_cannot_be_recorded_still_falls_back(store: ArtifactStore) -> None:
    certificate = publish(store, draft(), sections(), TOKENS)
    path = directory_of(store, certificate) / "boundary.safetensors"
    flip(path, path.stat().st_size - 1)

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", read_only)
        with pytest.raises(CorruptSectionError, match=r"not quarantined: .*Read-only"):
            read_all(store, certificate)
    assert store.counters["corrupt_sections"] == 1
    assert store.counters["files_quarantined"] == 0
    assert path.exists()


def test_a_fault_is_not_waited_for_and_recorded_later(
    store: ArtifactStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process holds the store's lock when the fault is seen."""
    monkeypatch.setattr(reader, "_QUARANTINE_WAIT_S", 0.0)
    certificate = publish(store, draft(), sections(), TOKENS)
    path = directory_of(store, certificate) / "boundary.safetensors"
    flip(path, path.stat().st_size - 1)
    with ArtifactStore(root) as other, other.catalogue.write():
        with pytest.raises(CorruptSectionError, match=r"not quarantined: .*locked"):
            read_all(store, certificate)
        store.flush_usage(wait_s=0.0)
    with pytest.raises(CorruptSectionError, match="; quarantined"):
        read_all(store, certificate)
    assert store.counters["corrupt_sections"] == 2
    assert store.counters["files_quarantined"] == 1


def test_verify_and_its_report(store: ArtifactStore) -> None:
    good = publish(store, draft(), sections(), [1])
    bad = publish(store, draft(), sections(), [2])
    read_all(store, bad)
    path = directory_of(store, bad) / "boundary.safetensors"
    flip(path, path.stat().st_size - 1)
    results = {result.artifact_id: result for result in store.verify()}
    assert results[good.artifact_id].problems == ()
    assert results[good.artifact_id].nbytes == sum(record.nbytes for record in good.sections.values())
    assert len(results[bad.artifact_id].problems) == 1
    assert [row.artifact_id for row in find(store)] == [good.artifact_id]
    # Asking again neither repairs nor records it twice.
    assert len(store.verify(bad.artifact_id)[0].problems) == 1
    assert len(store.quarantined()) == 1
    with pytest.raises(StoreError, match="to verify"):
        store.verify("ab" * 32)


def test_a_store_that_vanishes(store: ArtifactStore, root: Path) -> None:
    certificate = publish(store, draft(), sections(), TOKENS)
    (root / "objects").rename(root.parent / "elsewhere")
    with pytest.raises(CorruptSectionError):
        store.load(certificate.artifact_id, NAMESPACE)


def test_a_fault_of_an_old_generation_leaves_the_new_in_service(store: ArtifactStore) -> None:
    first = publish(store, draft(), sections(1.0), TOKENS)
    old = store.load(first.artifact_id, NAMESPACE)
    second = publish(store, draft(), sections(2.0), TOKENS)
    path = directory_of(store, first) / "boundary.safetensors"
    flip(path, path.stat().st_size - 1)
    with pytest.raises(CorruptSectionError):
        old.section("boundary.streams")
    assert store.quarantined()[0].generation == 1
    assert read_all(store, second)["boundary.streams"].unique().tolist() == [2.0]


@pytest.mark.parametrize("found_by", ["tokens", "verify"])
@pytest.mark.parametrize("damage", TOKEN_DAMAGE)
def test_damaged_token_ids(store: ArtifactStore, root: Path, damage: str, found_by: str) -> None:
    """The artifact is in quarantine like one with a damaged section; the others are matched as before."""
    other = publish(store, draft(), sections(), [1, 2, 3])
    certificate = publish(store, draft(), sections(), TOKENS)
    alter_tokens(root, certificate.artifact_id, TOKEN_DAMAGE[damage])
    if found_by == "verify":
        results = {result.artifact_id: result for result in store.verify()}
        assert results[other.artifact_id].problems == ()
        [problem] = results[certificate.artifact_id].problems
        assert "tokens in catalogue.sqlite" in problem
    for _ in range(2):
        [row] = store.tokens(NAMESPACE, model())
        assert (row.artifact.artifact_id, row.token_ids.tolist()) == (other.artifact_id, [1, 2, 3])
    assert store.counters["corrupt_sections"] == 1
    assert store.counters["files_quarantined"] == 0
    [record] = store.quarantined()
    assert (record.artifact_id, record.section, record.file, record.moved_to) == (
        certificate.artifact_id,
        "tokens",
        "catalogue.sqlite",
        "",
    )
    assert find(store, token_ids=TOKENS) == ()
    with pytest.raises(CorruptSectionError, match="in quarantine: build it again"):
        store.load(certificate.artifact_id, NAMESPACE)
    # Its sections are sound, and still it is not put back.
    assert store.verify(certificate.artifact_id)[0].problems != ()
    assert find(store, token_ids=TOKENS) == ()
    publish(store, draft(), sections(), TOKENS)
    assert [row.token_ids.tolist() for row in store.tokens(NAMESPACE, model())] == [[1, 2, 3], TOKENS]
    assert store.doctor()[0].code == "superseded"


def test_token_ids_that_were_repaired(store: ArtifactStore, root: Path) -> None:
    certificate = publish(store, draft(), sections(), TOKENS)
    whole = store.catalogue.token_bytes(certificate.artifact_id)
    alter_tokens(root, certificate.artifact_id, TOKEN_DAMAGE["zeros"])
    assert store.tokens(NAMESPACE, model()) == ()
    alter_tokens(root, certificate.artifact_id, lambda ids: whole)
    assert store.verify()[0].problems == ()
    assert len(store.tokens(NAMESPACE, model())) == 1


def test_the_twin_of_an_artifact_with_damaged_token_ids_is_found(store: ArtifactStore, root: Path) -> None:
    """Two artifacts of the same content; the better one is damaged."""
    better = publish(store, draft(needs=("latents", "zl")), sections(), TOKENS)
    twin = publish(store, draft(needs=("latents",)), sections(), TOKENS)
    alter_tokens(root, better.artifact_id, TOKEN_DAMAGE["one id"])
    assert [row.artifact.artifact_id for row in store.tokens(NAMESPACE, model(), needs=("zl",))] == [twin.artifact_id]


def test_damaged_token_ids_in_a_locked_store(
    store: ArtifactStore, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process holds the lock: nothing can be recorded, and nothing damaged is matched all the same."""
    monkeypatch.setattr(reader, "_QUARANTINE_WAIT_S", 0.0)
    certificate = publish(store, draft(), sections(), TOKENS)
    alter_tokens(root, certificate.artifact_id, TOKEN_DAMAGE["a sign"])
    with ArtifactStore(root) as other, other.catalogue.write():
        assert store.tokens(NAMESPACE, model()) == ()
    assert "not quarantined: " in caplog.messages[-1]
    assert store.quarantined() == ()
    assert store.tokens(NAMESPACE, model()) == ()
    assert len(store.quarantined()) == 1


def test_an_artifact_removed_while_its_token_ids_are_read(store: ArtifactStore) -> None:
    """Not damage: nobody has it any more."""
    certificate = publish(store, draft(), sections(), TOKENS)
    [row] = store.list()
    store.remove(certificate.artifact_id, NAMESPACE)
    [problem] = store._reader.verify(row).problems[:1]
    assert "replaced or removed" in problem
    assert store.quarantined() == ()
