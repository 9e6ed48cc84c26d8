"""Whatever stops a publication at whatever step, a reader sees the old generation, the new one, or nothing."""

import contextlib
import errno
import itertools
import os
import re
import signal

import pytest

from redknot.artifact import publish as publish_module
from redknot.artifact.connection import CatalogueLink
from redknot.artifact.store import ArtifactStore
from redknot.errors import StoreError
from tests.artifact.kit import NAMESPACE, TOKENS, Steps, draft, find, kill_self, publish, run_child, sections

SMALL = {"layers": 2, "rows": 8}


def put(store: ArtifactStore, fill: float) -> None:
    publish(store, draft(), sections(fill, **SMALL), TOKENS, ["a.txt"])


def value_seen(store: ArtifactStore) -> float | None:
    """The one value of all sections a reader gets, None when it finds no artifact."""
    rows = find(store, token_ids=TOKENS)
    if not rows:
        return None
    artifact = store.load(rows[0].artifact_id, NAMESPACE)
    values = {value for name in artifact.certificate.sections for value in artifact.section(name).unique().tolist()}
    assert len(values) == 1
    return values.pop()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("old", [None, 1.0])
def test_disk_errors_at_every_step(store: ArtifactStore, number: int, old: float | None) -> None:
    if old is not None:
        put(store, old)
    failures = 0
    for at in itertools.count():
        fired = []

        def fail(what: str, fired: list[str] = fired) -> None:
            fired.append(what)
            raise OSError(number, os.strerror(number))

        with pytest.MonkeyPatch.context() as patch:
            Steps(at, fail).install(patch)
            try:
                put(store, 2.0 + at)
                old = 2.0 + at  # a step whose failure does no harm, or one step too many
            except StoreError as error:
                assert re.match(rf"cannot write /\S+: errno {number} ", str(error))  # noqa: PT017
                failures += 1
        assert store.counters["publish_failures"] == failures
        assert value_seen(store) == old
        assert [finding for finding in store.doctor() if finding.code != "superseded"] == []
        assert store.bytes_on_disk().temporary == 0
        if not fired:
            break
    assert failures > 20


def test_an_interrupt_at_every_step(store: ArtifactStore) -> None:
    old = 1.0
    put(store, old)
    for at in itertools.count():
        fired = []

        def interrupt(what: str, fired: list[str] = fired) -> None:
            fired.append(what)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            Steps(at, interrupt).install(patch)
            with contextlib.suppress(KeyboardInterrupt):
                put(store, 2.0 + at)
        seen = value_seen(store)
        assert seen in (old, 2.0 + at)
        old = seen
        if not fired:
            break
    assert at > 20
    assert old == 2.0 + at
    assert store.bytes_on_disk().temporary == 0
    store.gc(grace_s=0)
    assert store.doctor() == ()


@pytest.mark.parametrize("old", [None, 1.0])
def test_sigkill_at_every_step(store: ArtifactStore, old: float | None) -> None:
    """Steps are the disk calls of a publication and the SQL statements around them."""
    if old is not None:
        put(store, old)

    def killed(at: int) -> None:
        with ArtifactStore(store.root) as victim, pytest.MonkeyPatch.context() as patch:
            steps = Steps(at, kill_self)
            steps.install(patch)
            connect = CatalogueLink.connection

            def traced(self: CatalogueLink) -> object:
                connection = connect(self)
                connection.set_trace_callback(steps.step)
                return connection

            patch.setattr(CatalogueLink, "connection", traced)
            put(victim, 2.0)

    for at in itertools.count():
        status = run_child(lambda at=at: killed(at))
        store.gc(grace_s=0)
        assert store.doctor() == ()
        assert store.bytes_on_disk().temporary == 0
        if value_seen(store) == 2.0:
            break
        assert value_seen(store) == old
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert at > 30
    put(store, 3.0)
    assert value_seen(store) == 3.0


def test_a_catalogue_that_refuses_leaves_nothing(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(connection: object, *_: object) -> None:
        connection.execute("INSERT INTO no_such_table VALUES (1)")

    with monkeypatch.context() as patch:
        patch.setattr(publish_module, "put_names", full)
        with pytest.raises(StoreError, match="no_such_table"):
            put(store, 1.0)
    assert store.bytes_on_disk().objects == store.bytes_on_disk().temporary == 0
    assert store.list() == ()
