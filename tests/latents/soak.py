"""Many operations on a latent store whose worker runs freely, against the model, and nothing may leak.

python -m tests.latents.soak --operations 200000 --seed 1
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from redknot.latents.blocks import StoredBlock
from redknot.latents.policy import GreedyDual, Lru
from redknot.latents.store import LatentStore
from tests.kit.latents import NBYTES, Mirror, config

CHECK_EVERY = 500
MEMORY_SLACK = 48 << 20  # bytes


def operations(mirror: Mirror, dice: random.Random) -> list[tuple[int, Callable[[], None]]]:
    """Weights and operations; every operation draws its own numbers."""

    def number() -> int:
        return dice.randrange(1000)

    def key() -> int | None:
        return dice.choice((None, number()))

    def content() -> None:
        mirror.allocate(number())
        mirror.fill(-1, number())
        mirror.seal(-1, key())

    return [
        (10, lambda: mirror.allocate(number(), dice.choice((1, 1, 2, 5)))),
        (5, lambda: mirror.open(number(), dice.randint(0, 3))),
        (8, lambda: mirror.append(number(), dice.randint(0, NBYTES), number())),
        (4, lambda: mirror.fill(number(), number())),
        (8, lambda: mirror.seal(number(), key())),
        (12, content),
        (4, lambda: mirror.commit(number(), number(), dice.randint(1, 4))),
        (6, lambda: mirror.fork(number(), dice.randint(0, 6))),
        (3, lambda: mirror.share(number(), dice.randint(0, 4))),
        (3, lambda: mirror.adopt(number(), number())),
        (6, lambda: mirror.writable(number())),
        (45, lambda: mirror.free(number())),
        (1, lambda: mirror.misuse(number())),
        (8, lambda: mirror.find(number(), fetch=False, count=dice.randint(1, 4))),
        (8, lambda: mirror.find(number(), fetch=True, count=dice.randint(1, 4))),
        (2, lambda: mirror.prefetch(number())),
        (2, lambda: mirror.pin(number(), lease=dice.random() < 0.5)),
        (3, lambda: mirror.unpin(number())),
        (2, mirror.later),
        (4, lambda: mirror.demote(number())),
        (6, lambda: mirror.promote(number())),
        (1, lambda: mirror.store.shrink(dice.randint(1, 8)) and None),
    ]


def soak(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Do ``count`` operations, check often, free everything, and return the counters."""
    dice = random.Random(seed)
    now = [0.0]
    policy = (Lru, GreedyDual)[seed % 2]

    def make() -> LatentStore:
        return LatentStore(config(folder, device=24, host=12, disk=40), eviction=policy, clock=lambda: now[0])

    gc.collect()  # what others left open ends now, and not between the two counts
    threads, files, before = threading.active_count(), _open_files(), _blocks_alive()
    mirror = Mirror(make, now, contents=200, keys=60)
    weights, does = zip(*operations(mirror, dice), strict=True)
    memory = 0
    for done, does_it in enumerate(dice.choices(does, weights, k=count), start=1):
        does_it()
        if done % CHECK_EVERY == 0:
            mirror.check()
        if done % (20 * CHECK_EVERY) == 0:
            mirror.restart()
        if done == count // 4:
            memory = _resident()
    assert _resident() < memory + MEMORY_SLACK

    for run in list(mirror.holes):
        mirror.store.free(run)
        mirror.forget(run)
    for name, pins in mirror.pins.items():
        for _ in range(pins):
            mirror.store.unpin(name)
    mirror.later()
    mirror.later()
    assert mirror.store.flush()
    mirror.check()
    store = mirror.store
    assert store._table.runs == {}
    store._table.expire()
    assert store._table._leases == []
    gc.collect()
    alive = _blocks_alive() - before
    # The heaps of GreedyDual may remember as many blocks that left as twice those that are there, and eight more.
    remembered = 0 if policy is Lru else 4 * len(store._table.index) + 16
    assert alive <= len(store._table.index) + remembered, "blocks that nobody can find are alive"
    counters = mirror.before + Counter(store.counters())
    store.close()
    assert threading.active_count() == threads
    assert _open_files() == files
    return counters


def _blocks_alive() -> int:
    return sum(type(found) is StoredBlock for found in gc.get_objects())


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def _resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # one line for each of a thousand collisions
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        counters = soak(arguments.operations, arguments.seed, Path(folder))
    print(f"{arguments.operations} operations in {time.perf_counter() - start:.1f} s; books balance, nothing leaked")
    print(", ".join(f"{name} {count}" for name, count in counters.items() if count))


if __name__ == "__main__":
    main()
