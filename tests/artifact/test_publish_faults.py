"""Whatever stops a publication at whatever step, a reader sees the old generation, the new one, or nothing."""

import errno
import os
import signal
from pathlib import Path

import pytest

from redknot.artifact import publish as publish_module
from redknot.artifact.catalogue import Catalogue
from redknot.artifact.store import ArtifactStore
from redknot.errors import StoreError
from tests.artifact.kit import NAMESPACE, TOKENS, Steps, draft, kill_self, run_child, sections

SMALL = {"layers": 2, "rows": 8}


def publish(store: ArtifactStore, fill: float) -> None:
    store.publish(draft(), sections(fill, **SMALL), TOKENS, ["a.txt"])


def value_seen(store: ArtifactStore) -> float | None:
    """The one value of all sections a reader gets, None when it finds no artifact."""
    rows = store.find(NAMESPACE, token_ids=TOKENS)
    if not rows:
        return None
    artifact = store.load(rows[0].artifact_id, NAMESPACE)
    values = {value for name in artifact.certificate.sections for value in artifact.section(name).unique().tolist()}
    assert len(values) == 1
    return values.pop()


def steps_of_publication(root: Path) -> int:
    with ArtifactStore(root, create=True) as store, pytest.MonkeyPatch.context() as patch:
        steps = Steps(None, kill_self)
        steps.install(patch)
        publish(store, 1.0)
        return steps.count


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("old", [None, 1.0])
def test_disk_errors_at_every_step(tmp_path: Path, number: int, old: float | None) -> None:
    total = steps_of_publication(tmp_path / "dry")
    assert total > 20

    def fail(_: str) -> None:
        raise OSError(number, os.strerror(number))

    with ArtifactStore(tmp_path / "store", create=True) as store:
        if old is not None:
            publish(store, old)
        before = store.bytes_on_disk().objects
        for at in range(total):
            with pytest.MonkeyPatch.context() as patch:
                Steps(at, fail).install(patch)
                with pytest.raises(StoreError, match=rf"cannot write /\S+: errno {number} "):
                    publish(store, 2.0)
            assert store.counters["publish_failures"] == at + 1
            assert value_seen(store) == old
            size = store.bytes_on_disk()
            assert (size.objects, size.temporary) == (before, 0)
        assert store.doctor() == ()
        publish(store, 2.0)
        assert value_seen(store) == 2.0


def test_an_interrupt_at_every_step(tmp_path: Path) -> None:
    total = steps_of_publication(tmp_path / "dry")

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with ArtifactStore(tmp_path / "store", create=True) as store:
        publish(store, 1.0)
        for at in range(total):
            with pytest.MonkeyPatch.context() as patch:
                Steps(at, interrupt).install(patch)
                with pytest.raises(KeyboardInterrupt):
                    publish(store, 2.0)
            assert value_seen(store) == 1.0
            assert store.bytes_on_disk().temporary == 0
        store.gc(grace_s=0)
        assert store.doctor() == ()
        publish(store, 2.0)
        assert value_seen(store) == 2.0


@pytest.mark.parametrize("old", [None, 1.0])
def test_sigkill_at_every_step(tmp_path: Path, old: float | None) -> None:
    """Steps are the disk calls of a publication and the SQL statements around them."""
    seen = set()
    at = 0
    while True:
        root = tmp_path / f"store{at}"
        with ArtifactStore(root, create=True) as store:
            if old is not None:
                publish(store, old)

            def killed(root: Path = root, at: int = at) -> None:
                with ArtifactStore(root) as victim, pytest.MonkeyPatch.context() as patch:
                    steps = Steps(at, kill_self)
                    steps.install(patch)
                    connect = Catalogue._connect

                    def traced(self: Catalogue) -> object:
                        connection = connect(self)
                        connection.set_trace_callback(steps.step)
                        return connection

                    patch.setattr(Catalogue, "_connect", traced)
                    publish(victim, 2.0)

            status = run_child(killed)
            seen.add(value_seen(store))
            store.gc(grace_s=0)
            assert store.doctor() == ()
            if status == 0:
                assert value_seen(store) == 2.0
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
            publish(store, 3.0)
            assert value_seen(store) == 3.0
        at += 1
    assert at > 30
    assert seen == {old, 2.0}


def test_a_catalogue_that_refuses_leaves_nothing(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(connection: object, *_: object) -> None:
        connection.execute("INSERT INTO no_such_table VALUES (1)")

    with monkeypatch.context() as patch:
        patch.setattr(publish_module, "put_names", full)
        with pytest.raises(StoreError, match="no_such_table"):
            publish(store, 1.0)
    assert store.bytes_on_disk().objects == store.bytes_on_disk().temporary == 0
    assert store.list() == ()
