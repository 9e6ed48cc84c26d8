"""Only our own catalogues are opened; names, tokens and revisions are what was put in."""

import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from redknot.artifact.catalogue import Catalogue
from redknot.artifact.schema import CATALOGUE_FILE
from redknot.artifact.store import ArtifactStore
from redknot.errors import StoreError
from tests.artifact.kit import NAMESPACE, TOKENS, draft, find, model, publish, run_child, sections

DEEP = "[" * 100_000 + "]" * 100_000


def test_paths_that_are_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no artifact store at"):
        ArtifactStore(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="is not an artifact store"):
        ArtifactStore(tmp_path)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"not empty \(found thesis\.txt\)"):
        ArtifactStore(tmp_path, create=True)
    assert os.listdir(tmp_path) == ["thesis.txt"]
    with pytest.raises(StoreError, match="errno"):
        ArtifactStore(tmp_path / "thesis.txt", create=True)


@pytest.mark.parametrize("create", [False, True])
def test_catalogues_of_others(root: Path, create: bool) -> None:
    root.mkdir()
    file = root / CATALOGUE_FILE
    file.write_bytes(b"not a database " * 100)
    with pytest.raises(StoreError, match="not a database"):
        ArtifactStore(root, create=create)
    file.unlink()
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE mine (x)")
    connection.close()
    with pytest.raises(StoreError, match="not a RedKnot catalogue"):
        ArtifactStore(root, create=create)


@pytest.mark.parametrize(("version", "way_out"), [(2, "upgrade RedKnot"), (0, "build the store again")])
def test_catalogues_of_other_versions(root: Path, version: int, way_out: str) -> None:
    ArtifactStore(root, create=True).close()
    connection = sqlite3.connect(root / CATALOGUE_FILE)
    connection.execute(f"PRAGMA user_version={version}")
    connection.close()
    with pytest.raises(StoreError, match=f"schema version {version}, supported 1: {way_out}"):
        ArtifactStore(root)


def test_a_store_whose_creation_was_cut_short(root: Path) -> None:
    root.mkdir()
    (root / CATALOGUE_FILE).touch()
    with pytest.raises(StoreError, match="not a RedKnot catalogue"):
        ArtifactStore(root)
    with ArtifactStore(root, create=True) as store:
        assert store.list() == ()
    with ArtifactStore(root, create=True) as store:
        assert store.doctor() == ()


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE artifacts SET state = 'readx'", "record of artifact .* is damaged"),
        ("UPDATE artifacts SET needs = '[\"a'", "record of artifact .* is damaged"),
        ("UPDATE artifacts SET needs = '5'", "no list of names"),
        ("UPDATE artifacts SET needs = '[5]'", "no list of names"),
        ("UPDATE artifacts SET needs = cast(x'ff' AS text)", "."),
        ("DELETE FROM meta", "no revision"),
        ("UPDATE models SET identity = '{}'", "model's record is damaged"),
        (f"UPDATE models SET identity = '{DEEP}'", "model's record is damaged"),
        (f"UPDATE artifacts SET needs = '{DEEP}'", "record of artifact .* is damaged"),
    ],
)
def test_damaged_records_are_one_error(store: ArtifactStore, root: Path, statement: str, message: str) -> None:
    """Whoever reads them falls back; nothing else is raised."""
    publish(store, draft(), sections(0.0), [1])
    with closing(sqlite3.connect(root / "catalogue.sqlite", isolation_level=None)) as connection:
        connection.execute(statement)
    reads = [lambda: store.revision, lambda: store.tokens(NAMESPACE, model()), lambda: store.identities(NAMESPACE)]
    failed = []
    for read in reads:
        try:
            read()
        except StoreError as error:
            failed.append(str(error))
    assert len(failed) == 1
    assert re.search(message, failed[0])


def test_a_store_killed_while_it_was_made(root: Path) -> None:
    """Nobody sees a catalogue before it is whole; what is left aside is made anew."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "catalogue.sqlite.new").write_bytes(b"")
    with ArtifactStore(root, create=True) as store:
        assert store.list() == ()
    assert not (root / "catalogue.sqlite.new").exists()


def test_the_artifact_that_serves_parts_of_documents_is_preferred(store: ArtifactStore) -> None:
    """A second, smaller artifact of a document must not take away what the first one could do."""
    few = {"layers.0.entries": sections(0.0)["layers.0.entries"]}
    tail = publish(store, draft(needs=("latents", "window_tail")), few, TOKENS)
    whole = publish(store, draft(needs=("latents", "window_all", "window_tail")), sections(0.0), TOKENS)
    assert tail.artifact_id != whole.artifact_id
    [row] = store.tokens(NAMESPACE, model(), needs=("latents", "window_tail"))
    assert row.artifact.artifact_id == whole.artifact_id


def test_names_follow_content(store: ArtifactStore) -> None:
    def put(tokens: list[int], names: list[str], needs: tuple[str, ...] = ("zl",)) -> str:
        return publish(store, draft(needs=needs), sections(0.0), tokens, names).artifact_id

    old = put([1, 2], ["a.txt", "b.txt"])
    other_profile = put([1, 2], ["a.txt"], needs=("latents",))
    new = put([1, 2, 3], ["a.txt"])
    assert store.names(old, NAMESPACE) == ("b.txt",)
    assert store.names(new, NAMESPACE) == ("a.txt",)
    assert {row.artifact_id for row in find(store, name="a.txt")} == {other_profile, new}
    store.add_names(new, NAMESPACE, ["b.txt", "b.txt"])
    assert store.names(new, NAMESPACE) == ("a.txt", "b.txt")
    assert store.names(old, NAMESPACE) == ()
    with pytest.raises(StoreError, match="no artifact"):
        store.add_names(new, "tenant-b", ["x"])
    assert find(store, "tenant-b", name="a.txt") == ()


def test_tokens_come_back_and_the_best_artifact_is_chosen(store: ArtifactStore) -> None:
    full = publish(store, draft(needs=("latents", "zl"), world=2), sections(0.0, world=2), TOKENS)
    small = publish(store, draft(needs=("latents",)), {"layers.0.entries": sections(0.0)["layers.0.entries"]}, TOKENS)
    publish(store, draft(), sections(0.0), [7])
    publish(store, draft(model=model(weights_hash="other")), sections(0.0), [8])
    publish(store, draft(namespace="tenant-b"), sections(0.0), [9])
    by_need = {}
    for needs, world in ((("latents",), 8), (("latents", "zl"), 2), (("zl",), 4), (("unknown",), 1)):
        found = {row.artifact.token_count: row for row in store.tokens(NAMESPACE, model(), needs=needs, world=world)}
        assert sorted(found) == [1, len(TOKENS)]
        np.testing.assert_array_equal(found[len(TOKENS)].token_ids, np.array(TOKENS, np.int32))
        by_need[needs, world] = found[len(TOKENS)].artifact.artifact_id
    # None covers TP size 4 or an unknown need: then the smaller one, and validate says what is wrong with it.
    assert list(by_need.values()) == [small.artifact_id, full.artifact_id, small.artifact_id, small.artifact_id]


def test_known_token_ids_are_not_read_again(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of many documents gains one: only that one is read. A new generation is read too."""
    for number in range(3):
        publish(store, draft(), sections(0.0), [1, number])
    known = {row.artifact.artifact_id: row for row in store.tokens(NAMESPACE, model())}
    publish(store, draft(), sections(0.0), [1, 2])
    new = publish(store, draft(), sections(0.0), TOKENS)
    read, native = [], store.catalogue.token_bytes
    monkeypatch.setattr(store.catalogue, "token_bytes", lambda name: read.append(name) or native(name))
    again = {row.artifact.artifact_id: row for row in store.tokens(NAMESPACE, model(), known=known)}
    [replaced] = [name for name, row in known.items() if row.token_ids.tolist() == [1, 2]]
    assert sorted(read) == sorted([replaced, new.artifact_id])
    assert {name: row.token_ids.tolist() for name, row in again.items()} == {
        **{name: row.token_ids.tolist() for name, row in known.items()},
        new.artifact_id: TOKENS,
    }
    assert again[replaced].artifact.generation == 2


def test_a_use_is_no_change(store: ArtifactStore) -> None:
    """Else every request would read the tokens of a large store again."""
    identifier = publish(store, draft(), sections(0.0), [1]).artifact_id
    before = store.revision
    store.catalogue.touch({identifier: 4e9})
    assert store.catalogue.rows(NAMESPACE)[0].last_used == 4e9
    assert store.revision == before


def test_the_revision_grows_with_every_change(store: ArtifactStore) -> None:
    seen = [store.revision]
    identifier = publish(store, draft(), sections(0.0), [1]).artifact_id
    seen.append(store.revision)
    store.add_names(identifier, NAMESPACE, ["x"])
    seen.append(store.revision)
    store.remove(identifier, NAMESPACE)
    seen.append(store.revision)
    assert seen == sorted(set(seen))
    assert store.revision == seen[-1]


def test_identities_name_what_a_miss_is_due_to(store: ArtifactStore) -> None:
    publish(store, draft(), sections(0.0), [1])
    assert store.identities(NAMESPACE) == (model(),)
    assert store.identities("tenant-b") == ()


def test_a_failed_block_changes_nothing(store: ArtifactStore) -> None:
    identifier = publish(store, draft(), sections(0.0), [1]).artifact_id
    with pytest.raises(ZeroDivisionError), store.catalogue.write() as connection:  # noqa: PT012
        connection.execute("DELETE FROM artifacts")
        raise ZeroDivisionError
    assert [row.artifact_id for row in find(store)] == [identifier]
    with pytest.raises(StoreError, match="no such table"), store.catalogue.write() as connection:
        connection.execute("DELETE FROM absent")
    assert len(store.list()) == 1


def test_a_forked_child_has_its_own_connection(store: ArtifactStore) -> None:
    publish(store, draft(), sections(0.0), [1])
    assert run_child(lambda: publish(store, draft(), sections(0.0), [2])) == 0
    assert len(store.list()) == 2
    publish(store, draft(), sections(0.0), [3])
    assert len(store.list()) == 3


def test_use_is_recorded_in_batches(store: ArtifactStore) -> None:
    identifier = publish(store, draft(), sections(0.0), [1]).artifact_id
    created = store.list()[0].last_used
    store.load(identifier, NAMESPACE)
    assert store.list()[0].last_used == created
    store.flush_usage()
    assert store.list()[0].last_used > created
    store.catalogue.touch({identifier: 0.0})
    assert store.list()[0].last_used > created


def test_a_missing_catalogue_is_not_made_again(root: Path) -> None:
    with pytest.raises(StoreError, match="is gone"):
        Catalogue(root / CATALOGUE_FILE)
