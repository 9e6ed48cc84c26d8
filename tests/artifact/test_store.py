"""What is read equals what was written, in the right namespace, one generation at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch

from redknot.artifact.files import byte_view
from redknot.artifact.header import DTYPES
from redknot.artifact.publish import Publication, planned_bytes
from redknot.artifact.reasons import StaleGenerationError
from redknot.artifact.store import ArtifactStore
from redknot.errors import InputError, StoreError
from tests.artifact.kit import NAMESPACE, TOKENS, directory_of, draft, find, publish, read_all, read_sections, sections


def test_bit_for_bit(root: Path) -> None:
    made = sections(world=2)
    for number, dtype in enumerate(DTYPES.values()):
        raw = torch.randint(0, 2, (24,), dtype=torch.uint8)
        made[f"layers.{number}.kind_{number}"] = raw.view(dtype).view(3, -1)
    made["layers.0.empty"] = torch.empty(0, 16, dtype=torch.bfloat16)
    made["boundary.scalar"] = torch.tensor(3.5)
    made["boundary.strided"] = torch.randn(8, 6).t()
    with ArtifactStore(root, create=True) as store:
        certificate = publish(store, draft(world=2), made, TOKENS, ["a.txt"])
        for _ in range(2):
            found = read_all(store, certificate)
            assert found.keys() == made.keys()
            for name, tensor in made.items():
                assert found[name].dtype == tensor.dtype
                assert found[name].shape == tensor.shape
                assert byte_view(found[name]) == byte_view(tensor.contiguous())
        assert store.counters["hot_loads"] == 1
        assert store.counters["sections_verified"] == 2 * len(made)
        assert store.counters["published"] == 1
        assert store.counters["bytes_written"] == certificate.nbytes == store.bytes_on_disk().objects
        assert store.doctor() == ()


def test_a_namespace_never_sees_another(store: ArtifactStore) -> None:
    mine = publish(store, draft(), sections(), TOKENS, ["a.txt"])
    theirs = publish(store, draft(namespace="tenant-b"), sections(), TOKENS, ["a.txt"])
    assert mine.artifact_id != theirs.artifact_id
    with pytest.raises(StoreError) as refused:
        store.load(mine.artifact_id, "tenant-b")
    with pytest.raises(StoreError) as unknown:
        store.load(mine.artifact_id[::-1], "tenant-b")
    assert type(refused.value) is type(unknown.value) is StoreError
    assert str(refused.value).replace(mine.artifact_id[:12], "") == str(unknown.value).replace(
        mine.artifact_id[::-1][:12], ""
    )
    assert [row.artifact_id for row in find(store, token_ids=TOKENS)] == [mine.artifact_id]
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
    first = publish(store, draft(), sections(1.0), TOKENS)
    old = store.load(first.artifact_id, NAMESPACE)
    read_sections(old)
    second = publish(store, draft(), sections(2.0), TOKENS)
    assert (first.generation, second.generation) == (1, 2)
    assert first.artifact_id == second.artifact_id
    assert read_all(store, second)["boundary.streams"].unique().tolist() == [2.0]
    store.gc(grace_s=0)
    assert not directory_of(store, first).exists()
    # What was open before goes on being the old one.
    assert old.section("boundary.streams").unique().tolist() == [1.0]
    assert len(store.list()) == 1


def test_a_replaced_generation_whose_files_are_gone(store: ArtifactStore) -> None:
    first = publish(store, draft(), sections(1.0), TOKENS)
    old = store.load(first.artifact_id, NAMESPACE)
    publish(store, draft(), sections(2.0), TOKENS)
    store.gc(grace_s=0)
    with pytest.raises(StaleGenerationError):
        old.section("boundary.streams")
    assert store.quarantined() == ()
    assert store.counters["corrupt_sections"] == 0


def test_removal(store: ArtifactStore) -> None:
    certificate = publish(store, draft(), sections(), TOKENS, ["a.txt"])
    size = store.bytes_on_disk().objects
    assert store.remove(certificate.artifact_id, NAMESPACE) == size
    assert store.bytes_on_disk().objects == store.bytes_on_disk().temporary == 0
    assert find(store, name="a.txt") == ()
    with pytest.raises(StoreError, match="no artifact"):
        store.load(certificate.artifact_id, NAMESPACE)
    assert publish(store, draft(), sections(), TOKENS).generation == 1


def test_several_documents_in_one_transaction(store: ArtifactStore) -> None:
    before = store.revision
    items = (Publication(draft(), sections(float(n)), [n], [f"{n}.txt"]) for n in (1, 2, 1))
    first, second, again = store.publish_many(items)
    assert store.revision == (before[0], before[1] + 1)
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
        ({"layer_group": 0}, (), "layer_group must be at least 1"),
    ],
)
def test_drafts_that_do_not_fit(store: ArtifactStore, change: dict, drop: tuple[str, ...], message: str) -> None:
    made = {name: value for name, value in sections().items() if not any(kind in name for kind in drop)}
    with pytest.raises(StoreError, match=message):
        publish(store, draft(**change), made, TOKENS)
    assert store.bytes_on_disk().temporary == 0


def test_section_names_are_checked_before_a_file_is_made(store: ArtifactStore) -> None:
    with pytest.raises(StoreError, match="not a section name"):
        publish(store, draft(), {"boundary.../../x": torch.zeros(1)}, TOKENS)


def test_what_is_published_is_in_the_catalogue(store: ArtifactStore) -> None:
    certificate = publish(store, draft(), sections(), TOKENS)
    [row] = find(store, token_ids=np.array(TOKENS), model=certificate.model)
    assert row.artifact_id == certificate.artifact_id
    assert row.needs == certificate.needs == ("latents", "streams", "zl")
    assert row.nbytes == store.bytes_on_disk().objects
    assert find(store, token_ids=TOKENS[1:]) == ()


@pytest.mark.parametrize(("world", "layer_group"), [(1, 3), (2, 1), (1, 8)])
def test_one_number_of_bytes(store: ArtifactStore, world: int, layer_group: int) -> None:
    """What a build reports, the catalogue lists and the disk holds."""
    made = sections(world=world, rows=5)
    certificate = publish(store, draft(world=world, layer_group=layer_group), made, TOKENS)
    assert certificate.nbytes == store.list()[0].nbytes == store.bytes_on_disk().objects
    assert store.counters["bytes_written"] == certificate.nbytes
    assert certificate.nbytes > sum(tensor.nbytes for tensor in made.values())


def test_planned_bytes_are_within_one_percent(store: ArtifactStore) -> None:
    made = sections(rows=2000)
    certificate = publish(store, draft(), made, TOKENS)
    planned = planned_bytes(draft(), {name: (r.dtype, r.shape) for name, r in certificate.sections.items()})
    assert planned == pytest.approx(store.bytes_on_disk().objects, rel=0.01)
