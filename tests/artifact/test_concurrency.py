"""Builders and readers of one document, killed at random: old, new or nothing, and nothing left behind."""

import os
import random
import select
import signal
from pathlib import Path

import pytest

from redknot.artifact.reasons import StaleGenerationError
from redknot.artifact.store import ArtifactStore
from tests.artifact.kit import NAMESPACE, TOKENS, draft, find, publish, read_sections, sections, start_child


def build_forever(root: Path, number: int, progress: int) -> None:
    with ArtifactStore(root, create=True) as store:
        while True:
            publish(store, draft(), sections(float(number), layers=2, rows=8), TOKENS, ["a.txt"])
            os.write(progress, b"b")


def read_forever(root: Path, number: int, progress: int) -> None:
    """Exits with 1 on anything but one whole generation, or none."""
    with ArtifactStore(root, create=True) as store:
        generation = 0
        while True:
            if number == 0:
                store.gc(grace_s=0)
            for row in find(store):
                artifact = store.load(row.artifact_id, NAMESPACE)
                assert artifact.certificate.generation >= generation
                generation = artifact.certificate.generation
                try:
                    tensors = read_sections(artifact)
                except StaleGenerationError:
                    continue
                assert len({value for tensor in tensors.values() for value in tensor.unique().tolist()}) == 1
            assert store.quarantined() == ()
            os.write(progress, b"r")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_four_builders_and_four_readers_killed_at_random(root: Path, seed: int) -> None:
    dice = random.Random(seed)
    receive, send = os.pipe()
    workers = [start_child(lambda n=n: build_forever(root, n + 1, send)) for n in range(4)]
    workers += [start_child(lambda n=n: read_forever(root, n, send)) for n in range(4)]
    os.close(send)
    statuses = []
    seen = b""
    try:
        while seen.count(b"b") < 4:
            ready, _, _ = select.select([receive], [], [], 60)
            assert ready, "no progress"
            seen += os.read(receive, 1)
        while workers:
            # Let something happen, then kill whoever comes up, wherever it is.
            for _ in range(dice.randint(2, 12)):
                ready, _, _ = select.select([receive], [], [], 60)
                assert ready, "no progress"
                os.read(receive, 1)
            victim = workers.pop(dice.randrange(len(workers)))
            os.kill(victim, signal.SIGKILL)
            statuses.append(os.waitpid(victim, 0)[1])
    finally:
        os.close(receive)
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
    assert all(os.WIFSIGNALED(status) for status in statuses)
    with ArtifactStore(root) as store:
        store.gc(grace_s=0)
        assert store.doctor() == ()
        size = store.bytes_on_disk()
        assert size.temporary == size.quarantine == 0
        assert store.quarantined() == ()
        [row] = find(store)
        assert size.objects == row.nbytes
        assert store.verify()[0].problems == ()


def test_creators_of_one_store(root: Path) -> None:
    workers = [start_child(lambda: ArtifactStore(root, create=True).close()) for _ in range(6)]
    assert [os.waitpid(worker, 0)[1] for worker in workers] == [0] * 6
    with ArtifactStore(root) as store:
        assert store.doctor() == ()
