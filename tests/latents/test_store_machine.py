"""The latent store against a model of dictionaries: any operations in any order."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from redknot.latents.content import Hasher, content_hash
from redknot.latents.policy import GreedyDual, Lru
from redknot.latents.store import LatentStore
from tests.kit.latents import NBYTES, Mirror, config

NUMBER = st.integers(0, 11)


class Machine(RuleBasedStateMachine):
    hasher: Hasher = staticmethod(content_hash)
    policy: type = Lru
    blocks: tuple[int, int, int] = (5, 3, 6)

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        now = [1000.0]
        self.mirror = Mirror(lambda: self.make(now), now, self.hasher)

    def make(self, now: list[float]) -> LatentStore:
        device, host, disk = self.blocks
        folder = Path(self.folder.name) / "disk" if disk else None
        return LatentStore(
            config(folder, device=device, host=host, disk=disk),
            hasher=self.hasher,
            eviction=self.policy,
            clock=lambda: now[0],
        )

    @rule(number=NUMBER, blocks=st.integers(0, 3))
    def allocate(self, number: int, blocks: int) -> None:
        self.mirror.allocate(number, blocks)

    @rule(number=NUMBER, more=st.integers(0, 2))
    def open(self, number: int, more: int) -> None:
        self.mirror.open(number, more)

    @rule(number=NUMBER, length=st.integers(0, NBYTES), byte=NUMBER)
    def append(self, number: int, length: int, byte: int) -> None:
        self.mirror.append(number, length, byte)

    @rule(number=NUMBER, which=NUMBER)
    def fill(self, number: int, which: int) -> None:
        self.mirror.fill(number, which)

    @rule(number=NUMBER, key=st.none() | NUMBER)
    def seal(self, number: int, key: int | None) -> None:
        self.mirror.seal(number, key)

    @rule(number=NUMBER, which=NUMBER, key=st.none() | NUMBER)
    def make_content(self, number: int, which: int, key: int | None) -> None:
        """Long runs of steps are needed to seal anything otherwise."""
        self.mirror.allocate(number)
        self.mirror.fill(-1, which)
        self.mirror.seal(-1, key)

    @rule(number=NUMBER, key=NUMBER, blocks=st.integers(1, 3))
    def commit(self, number: int, key: int, blocks: int) -> None:
        self.mirror.commit(number, key, blocks)

    @rule(number=NUMBER, count=st.integers(0, 4))
    def fork(self, number: int, count: int) -> None:
        self.mirror.fork(number, count)

    @rule(number=NUMBER, count=st.integers(0, 3))
    def share(self, number: int, count: int) -> None:
        self.mirror.share(number, count)

    @rule(number=NUMBER, other=NUMBER)
    def adopt(self, number: int, other: int) -> None:
        self.mirror.adopt(number, other)

    @rule(number=NUMBER)
    def writable(self, number: int) -> None:
        self.mirror.writable(number)

    @rule(number=NUMBER)
    def free(self, number: int) -> None:
        self.mirror.free(number)

    @rule(number=NUMBER)
    def free_three(self, number: int) -> None:
        for _ in range(3):
            self.mirror.free(number)

    @rule(number=NUMBER)
    def misuse(self, number: int) -> None:
        self.mirror.misuse(number)

    @rule(number=NUMBER, fetch=st.booleans(), count=st.integers(1, 3))
    def find(self, number: int, fetch: bool, count: int) -> None:
        self.mirror.find(number, fetch=fetch, count=count)

    @rule(number=NUMBER)
    def prefetch(self, number: int) -> None:
        self.mirror.prefetch(number)

    @rule(number=NUMBER, lease=st.booleans())
    def pin(self, number: int, lease: bool) -> None:
        self.mirror.pin(number, lease=lease)

    @rule(number=NUMBER)
    def unpin(self, number: int) -> None:
        self.mirror.unpin(number)

    @rule()
    def later(self) -> None:
        self.mirror.later()

    @rule(number=NUMBER)
    def demote(self, number: int) -> None:
        self.mirror.demote(number)

    @rule(number=NUMBER)
    def promote(self, number: int) -> None:
        self.mirror.promote(number)

    @rule(blocks=st.integers(1, 5))
    def shrink(self, blocks: int) -> None:
        assert self.mirror.store.shrink(blocks)

    @rule()
    def flush(self) -> None:
        assert self.mirror.store.flush()

    @rule()
    def restart(self) -> None:
        self.mirror.restart()

    @invariant()
    def balanced(self) -> None:
        self.mirror.check()

    def teardown(self) -> None:
        self.mirror.store.close()
        self.folder.cleanup()


class Colliding(Machine):
    hasher = staticmethod(lambda _: b"constant")


class CostAware(Machine):
    policy = GreedyDual


class WithoutHost(Machine):
    blocks = (4, 0, 5)


class WithoutDisk(Machine):
    blocks = (4, 3, 0)


class DeviceOnly(Machine):
    blocks = (4, 0, 0)


@pytest.mark.parametrize("machine", [Machine, Colliding, CostAware, WithoutHost, WithoutDisk, DeviceOnly])
def test_any_operations_in_any_order(machine: type[Machine]) -> None:
    examples = settings().max_examples  # of the profile
    run_state_machine_as_test(machine, settings=settings(max_examples=examples // 3, stateful_step_count=50))
