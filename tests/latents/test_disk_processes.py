"""Processes that write and read one disk tier, killed at random: a reader sees whole blocks or none."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from redknot.latents.content import Name, caller_name
from redknot.latents.disk import DiskTier, Written
from redknot.latents.diskfile import PREFIX_BYTES
from tests.artifact.kit import start_child

NBYTES = 32 * 1024
NAMES = 40
FILES = 24  # fewer than there are names: the processes evict under each other


def opened(folder: Path) -> DiskTier:
    return DiskTier(folder, b"layout", NBYTES, FILES * (PREFIX_BYTES + NBYTES))


def name(number: int) -> Name:
    return caller_name("a", b"%d" % number)


def payload(number: int) -> memoryview:
    return memoryview(number.to_bytes(4, "little") * (NBYTES // 4))


def write_forever(folder: Path, seed: int, progress: int) -> None:
    dice, tier = random.Random(seed), opened(folder)
    while True:
        number = dice.randrange(NAMES)
        assert tier.write(name(number), payload(number), 1.0) is not Written.COLLIDED
        os.write(progress, b"w")


def read_forever(folder: Path, seed: int, progress: int) -> None:
    """Exits with 1 on anything but a whole block, or none."""
    dice, tier = random.Random(seed), opened(folder)
    into = memoryview(bytearray(NBYTES))
    while True:
        number = dice.randrange(NAMES)
        if tier.read(name(number), into) is not None:
            assert into == payload(number)
        if dice.random() < 0.02:
            tier.refresh()
        assert tier.counts()["disk_quarantined"] == 0
        os.write(progress, b"r")


def play(folder: Path, seed: int) -> None:
    """One round: four writers and four readers, each killed somewhere."""
    dice = random.Random(seed)
    receive, send = os.pipe()
    workers = [start_child(lambda n=n: write_forever(folder, seed * 100 + n, send)) for n in range(4)]
    workers += [start_child(lambda n=n: read_forever(folder, seed * 100 + n, send)) for n in range(4, 8)]
    os.close(send)
    statuses = []
    try:
        while workers:
            for _ in range(dice.randint(1, 25)):
                ready, _, _ = select.select([receive], [], [], 60)
                assert ready, "no progress"
                assert os.read(receive, 1), "every worker has failed"
            victim = workers.pop(dice.randrange(len(workers)))
            os.kill(victim, signal.SIGKILL)
            statuses.append(os.waitpid(victim, 0)[1])
    finally:
        os.close(receive)
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
    assert all(os.WIFSIGNALED(status) for status in statuses)


@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_writers_and_readers_killed_at_random(tmp_path: Path, rounds: int) -> None:
    found = 0
    into = memoryview(bytearray(NBYTES))
    for seed in range(rounds):
        play(tmp_path, seed)
        tier = opened(tmp_path)
        assert tier.recount() == []
        for number in range(NAMES):
            if tier.read(name(number), into) is not None:
                assert into == payload(number)
                found += 1
        assert tier.counts()["disk_quarantined"] == tier.counts()["io_errors"] == 0
        assert list(tmp_path.glob("*/quarantine/*")) == []
        assert tier.write(name(NAMES + seed), payload(NAMES + seed), 1.0) is Written.STORED
        assert tier.book().free >= 0
    assert found > rounds


def test_a_process_without_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from redknot.latents.content import caller_name
from redknot.latents.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), b"layout", {NBYTES}, {FILES * (PREFIX_BYTES + NBYTES)})
tier.write(caller_name("a", b"3"), memoryview((3).to_bytes(4, "little") * {NBYTES // 4}), 1.0)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
    into = memoryview(bytearray(NBYTES))
    assert opened(tmp_path).read(name(3), into) == 1.0
    assert into == payload(3)
