"""What is read equals what was written, in the right namespace; every fault is seen, counted and put aside."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from redknot.artifact.certificate import Certificate
from redknot.artifact.files import SafetensorsFile, byte_view
from redknot.artifact.header import DTYPES
from redknot.artifact.publish import Publication, planned_bytes
from redknot.artifact.reasons import MissingSectionError, StaleGenerationError
from redknot.artifact.schema import generation_dir
from redknot.artifact.store import ArtifactStore
from redknot.errors import CorruptSectionError, InputError, StoreError
from tests.artifact.kit import NAMESPACE, TOKENS, draft, sections


def directory_of(store: ArtifactStore, certificate: Certificate) -> Path:
    return generation_dir(store.root, certificate.artifact_id, certificate.generation)


def read_all(store: ArtifactStore, certificate: Certificate) -> dict[str, torch.Tensor]:
    artifact = store.load(certificate.artifact_id, NAMESPACE)
    return {name: artifact.section(name) for name in artifact.certificate.sections}


@pytest.mark.parametrize("mapped", [True, False])
def test_bit_for_bit(root: Path, mapped: bool) -> None:
    made = sections(world=2)
    for number, dtype in enumerate(DTYPES.values()):
        raw = torch.randint(0, 2, (24,), dtype=torch.uint8)
        made[f"layers.{number}.kind_{number}"] = raw.view(dtype).view(3, -1)
    made["layers.0.empty"] = torch.empty(0, 16, dtype=torch.bfloat16)
    made["controller.scalar"] = torch.tensor(3.5)
    made["controller.strided"] = torch.randn(8, 6).t()
    with ArtifactStore(root, create=True, mapped=mapped) as store:
        certificate = store.publish(draft(world=2), made, TOKENS, ["a.txt"])
        for _ in range(2):
            found = read_all(store, certificate)
            assert found.keys() == made.keys()
            for name, tensor in made.items():
                assert found[name].dtype == tensor.dtype
                assert found[name].shape == tensor.shape
                assert byte_view(found[name]) == byte_view(tensor.contiguous())
        assert store.counters["hot_loads"] == 1
        reads = len(made) if mapped else 2 * len(made)
        assert store.counters["sections_verified"] == reads
        assert store.counters["published"] == 1
        assert store.counters["bytes_written"] == certificate.nbytes
        assert store.doctor() == ()


def test_a_namespace_never_sees_another(store: ArtifactStore) -> None:
    mine = store.publish(draft(), sections(), TOKENS, ["a.txt"])
    theirs = store.publish(draft(namespace="tenant-b"), sections(), TOKENS, ["a.txt"])
    assert mine.artifact_id != theirs.artifact_id
    with pytest.raises(StoreError) as refused:
        store.load(mine.artifact_id, "tenant-b")
    with pytest.raises(StoreError) as unknown:
        store.load(mine.artifact_id[::-1], "tenant-b")
    assert type(refused.value) is type(unknown.value) is StoreError
    assert str(refused.value).replace(mine.artifact_id[:12], "") == str(unknown.value).replace(
        mine.artifact_id[::-1][:12], ""
    )
    assert [row.artifact_id for row in store.find(NAMESPACE, token_ids=TOKENS)] == [mine.artifact_id]
    assert [row.artifact_id for row in store.list("tenant-b")] == [theirs.artifact_id]
    with pytest.raises(StoreError):
        store.remove(mine.artifact_id, "tenant-b")
    assert store.load(mine.artifact_id, NAMESPACE).certificate == mine


def test_malformed_ids_never_become_paths(store: ArtifactStore) -> None:
    for bad in ("", "../../etc", "A" * 64):
        with pytest.raises(StoreError, match="not an artifact id"):
            store.load(bad, NAMESPACE)
        with pytest.raises(StoreError, match="not an artifact id"):
            store.remove(bad, NAMESPACE)


def test_a_new_generation_replaces_the_old(store: ArtifactStore) -> None:
    first = store.publish(draft(), sections(1.0), TOKENS)
    old = store.load(first.artifact_id, NAMESPACE)
    old.open_files()
    second = store.publish(draft(), sections(2.0), TOKENS)
    assert (first.generation, second.generation) == (1, 2)
    assert first.artifact_id == second.artifact_id
    assert read_all(store, second)["boundary.streams"].unique().tolist() == [2.0]
    store.gc(grace_s=0)
    assert not directory_of(store, first).exists()
    # What was open before goes on being the old one.
    assert old.section("boundary.streams").unique().tolist() == [1.0]
    assert len(store.list()) == 1


def test_a_replaced_generation_whose_files_are_gone(store: ArtifactStore) -> None:
    first = store.publish(draft(), sections(1.0), TOKENS)
    old = store.load(first.artifact_id, NAMESPACE)
    store.publish(draft(), sections(2.0), TOKENS)
    store.gc(grace_s=0)
    with pytest.raises(StaleGenerationError):
        old.section("boundary.streams")
    assert store.quarantined() == ()
    assert store.counters["corrupt_sections"] == 0


def test_removal(store: ArtifactStore) -> None:
    certificate = store.publish(draft(), sections(), TOKENS, ["a.txt"])
    size = store.bytes_on_disk().objects
    assert store.remove(certificate.artifact_id, NAMESPACE) == size
    assert store.bytes_on_disk().objects == store.bytes_on_disk().temporary == 0
    assert store.find(NAMESPACE, name="a.txt") == ()
    with pytest.raises(StoreError, match="no artifact"):
        store.load(certificate.artifact_id, NAMESPACE)
    assert store.publish(draft(), sections(), TOKENS).generation == 1


def test_several_documents_in_one_transaction(store: ArtifactStore) -> None:
    before = store.revision
    items = (Publication(draft(), sections(float(n)), [n], [f"{n}.txt"]) for n in (1, 2, 1))
    first, second, again = store.publish_many(items)
    assert store.revision == before + 1
    assert (first.generation, again.generation) == (1, 2)
    assert first.artifact_id == again.artifact_id != second.artifact_id
    assert len(store.list()) == 2
    assert store.load(first.artifact_id, NAMESPACE).certificate.generation == 2
    assert store.doctor()[0].code == "superseded"


def test_one_bad_document_publishes_none(store: ArtifactStore) -> None:
    items = [Publication(draft(), sections(), [1]), Publication(draft(), sections(), [-1])]
    with pytest.raises(InputError):
        store.publish_many(items)
    assert store.list() == ()
    assert store.bytes_on_disk().objects == store.bytes_on_disk().temporary == 0


@pytest.mark.parametrize(
    ("change", "drop", "message"),
    [
        ({"world": 2}, (), "needs the shards of all 2 ranks"),
        ({"world": 2}, ("zl",), "world must be 1, not 2"),
        ({"namespace": ""}, (), "needs a namespace"),
        ({"layer_group": 0}, (), ""),
    ],
)
def test_drafts_that_do_not_fit(store: ArtifactStore, change: dict, drop: tuple[str, ...], message: str) -> None:
    made = {name: value for name, value in sections().items() if not any(kind in name for kind in drop)}
    with pytest.raises((StoreError, ZeroDivisionError), match=message):
        store.publish(draft(**change), made, TOKENS)
    assert store.bytes_on_disk().temporary == 0


def test_section_names_are_checked_before_a_file_is_made(store: ArtifactStore) -> None:
    with pytest.raises(StoreError, match="not a section name"):
        store.publish(draft(), {"boundary.../../x": torch.zeros(1)}, TOKENS)


def test_find(store: ArtifactStore) -> None:
    certificate = store.publish(draft(), sections(), TOKENS)
    [row] = store.find(NAMESPACE, token_ids=np.array(TOKENS), model=certificate.model, needs=("zl", "latents"))
    assert row.artifact_id == certificate.artifact_id
    assert row.needs == certificate.needs
    assert row.nbytes == store.bytes_on_disk().objects
    assert store.find(NAMESPACE, needs=("window_all",)) == ()
    assert store.find(NAMESPACE, token_ids=TOKENS[1:]) == ()


def test_planned_bytes_are_within_one_percent(store: ArtifactStore) -> None:
    made = sections(rows=2000)
    certificate = store.publish(draft(), made, TOKENS)
    planned = planned_bytes(draft(), {name: (r.dtype, r.shape) for name, r in certificate.sections.items()})
    assert planned == pytest.approx(store.bytes_on_disk().objects, rel=0.01)


def flip(path: Path, at: int) -> None:
    before = path.stat()
    with open(path, "r+b") as handle:
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 0x10]))
    # A disk that rots does not touch the times.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def offset_of(path: Path, name: str) -> int:
    opened = SafetensorsFile(path)
    return 8 + int.from_bytes(path.read_bytes()[:8], "little") + opened.entries[name].end - 1


@pytest.mark.parametrize("mapped", [True, False])
def test_a_flipped_bit_in_each_section(root: Path, mapped: bool) -> None:
    with ArtifactStore(root, create=True, mapped=mapped) as store:
        bystander = store.publish(draft(), sections(), [1])
        names = sorted(store.load(bystander.artifact_id, NAMESPACE).certificate.sections)
        for count, name in enumerate(names, start=1):
            certificate = store.publish(draft(), sections(), TOKENS)
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
            assert store.find(NAMESPACE, token_ids=TOKENS) == ()
            with pytest.raises(CorruptSectionError, match="in quarantine"):
                store.load(certificate.artifact_id, NAMESPACE)
        # The others are unaffected, and building again is all that is needed.
        assert len(read_all(store, bystander)) == len(names)
        assert len(read_all(store, store.publish(draft(), sections(), TOKENS))) == len(names)


def test_truncation_at_every_page_of_every_file(store: ArtifactStore) -> None:
    made = sections(rows=600)
    certificate = store.publish(draft(), made, TOKENS)
    files = sorted(path.name for path in directory_of(store, certificate).iterdir())
    cuts = 0
    for file in files:
        size = (directory_of(store, certificate) / file).stat().st_size
        for at in {*range(0, size, 4096), size - 1}:
            os.truncate(directory_of(store, certificate) / file, at)
            with pytest.raises(CorruptSectionError):
                store.load(certificate.artifact_id, NAMESPACE).open_files()
            cuts += 1
            assert store.counters["corrupt_sections"] == cuts
            assert store.find(NAMESPACE) == ()
            certificate = store.publish(draft(), made, TOKENS)
            store.gc(grace_s=0)
    assert cuts > 40
    assert len(read_all(store, certificate)) == len(made)


def test_a_missing_file_is_refused_never_filled(store: ArtifactStore) -> None:
    for file in ("latents.0-2.safetensors", "zl.3-5.r0of1.safetensors", "boundary.safetensors", "certificate.json"):
        certificate = store.publish(draft(), sections(), TOKENS)
        (directory_of(store, certificate) / file).unlink()
        with pytest.raises(CorruptSectionError, match=f"{file}.*ENOENT"):
            read_all(store, certificate)
        assert store.quarantined()[-1].file == file
    assert store.counters["io_errors"] == 4


def test_a_section_that_was_never_stored(store: ArtifactStore) -> None:
    certificate = store.publish(draft(), sections(), TOKENS)
    with pytest.raises(MissingSectionError):
        store.load(certificate.artifact_id, NAMESPACE).section("layers.9.entries")
    assert store.quarantined() == ()


def test_files_of_another_artifact_are_noticed(store: ArtifactStore) -> None:
    one = store.publish(draft(), sections(), [1])
    two = store.publish(draft(), sections(), [2])
    for file, message in (("certificate.json", "another artifact"), ("boundary.safetensors", "checksum")):
        (directory_of(store, two) / file).write_bytes((directory_of(store, one) / file).read_bytes())
        with pytest.raises(CorruptSectionError, match=message):
            read_all(store, two)
        two = store.publish(draft(), sections(), [2])


def test_a_shard_of_another_rank_is_noticed(store: ArtifactStore) -> None:
    certificate = store.publish(draft(world=2), sections(world=2), TOKENS)
    directory = directory_of(store, certificate)
    (directory / "zl.0-2.r1of2.safetensors").write_bytes((directory / "zl.0-2.r0of2.safetensors").read_bytes())
    artifact = store.load(certificate.artifact_id, NAMESPACE)
    artifact.open_files(rank=0)
    with pytest.raises(CorruptSectionError, match="other sections"):
        artifact.open_files(rank=1)


def test_damage_after_the_first_read_is_seen_by_the_next_load(store: ArtifactStore) -> None:
    certificate = store.publish(draft(), sections(), TOKENS)
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
    with ArtifactStore(root, create=True, mapped=False) as store:
        certificate = store.publish(draft(), sections(), TOKENS)
        artifact = store.load(certificate.artifact_id, NAMESPACE)

        def fail(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(StoreError, match=f"boundary.safetensors: errno {number} .{errno.errorcode[number]}") as e:
                artifact.section("boundary.streams")
        assert isinstance(e.value, CorruptSectionError) == quarantined
        assert store.counters["io_errors"] == 1
        assert store.counters["corrupt_sections"] == quarantined
        assert bool(store.find(NAMESPACE)) != quarantined
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
    certificate = store.publish(draft(), sections(), TOKENS)
    path = directory_of(store, certificate) / "boundary.safetensors"
    flip(path, path.stat().st_size - 1)

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", read_only)
        with pytest.raises(CorruptSectionError, match="not quarantined: .*Read-only"):
            read_all(store, certificate)
    assert store.counters["corrupt_sections"] == 1
    assert store.counters["files_quarantined"] == 0
    assert path.exists()


def test_verify_and_its_report(store: ArtifactStore) -> None:
    good = store.publish(draft(), sections(), [1])
    bad = store.publish(draft(), sections(), [2])
    read_all(store, bad)
    path = directory_of(store, bad) / "controller.safetensors"
    flip(path, path.stat().st_size - 1)
    results = {result.artifact_id: result for result in store.verify()}
    assert results[good.artifact_id].problems == ()
    assert results[good.artifact_id].nbytes == good.nbytes
    assert len(results[bad.artifact_id].problems) == 1
    assert [row.artifact_id for row in store.find(NAMESPACE)] == [good.artifact_id]
    # Asking again neither repairs nor records it twice.
    assert len(store.verify(bad.artifact_id)[0].problems) == 1
    assert len(store.quarantined()) == 1
    with pytest.raises(StoreError, match="to verify"):
        store.verify("ab" * 32)


def test_a_store_that_vanishes(store: ArtifactStore, root: Path) -> None:
    certificate = store.publish(draft(), sections(), TOKENS)
    (root / "objects").rename(root.parent / "elsewhere")
    with pytest.raises(CorruptSectionError):
        store.load(certificate.artifact_id, NAMESPACE)
