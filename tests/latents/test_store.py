"""The latent store, rule by rule; any order of operations is in test_store_machine.py."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from redknot.errors import ConfigError, StoreError
from redknot.latents.content import Name, caller_name, content_hash, content_name
from redknot.latents.handles import (
    ARENA,
    DEVICE,
    HOST,
    ArenaFullError,
    BlockStateError,
    ForeignHandleError,
    Handle,
    Match,
    MovedHandleError,
    Outcome,
    PoolFullError,
    Run,
    StaleHandleError,
)
from redknot.latents.pool import Pool
from redknot.latents.settings import StoreConfig
from redknot.latents.store import LatentStore
from redknot.latents.worker import Job
from tests.artifact.kit import flip
from tests.kit.latents import NBYTES, config, content, opened, stored, tensor, there


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LatentStore]:
    with LatentStore(config(tmp_path / "disk")) as opened:
        yield opened
        assert opened.drain()
        assert opened.recount() == []


def sealed(store: LatentStore, number: int, namespace: str = "a", key: bytes | None = None) -> Handle:
    """A content in a run of one."""
    handle = opened(store, namespace)
    store.append(handle, tensor(content(number)))
    return store.seal(handle, key=key).handle


def cached(store: LatentStore, numbers: range) -> None:
    """Contents under their numbers, without references, one after the other."""
    for number in numbers:
        store.free(sealed(store, number, key=b"%d" % number).run)
        assert store.drain()


def names(numbers: range) -> list[Name]:
    return [caller_name("a", b"%d" % number) for number in numbers]


def match(store: LatentStore, asked: list[Name]) -> list[Handle | None]:
    return _there(store, store.match(asked), len(asked))


def fetch(store: LatentStore, asked: list[Name], timeout_s: float = 60.0) -> list[Handle | None]:
    return _there(store, store.fetch(asked, timeout_s), len(asked))


def _there(store: LatentStore, found: Match, count: int) -> list[Handle | None]:
    """Handles of a match, which is given back where nothing was found."""
    handles = there(store, found, count)
    if len(found.missing) == count:
        store.free(found.run)
    return handles


def fork(store: LatentStore, handle: Handle) -> Handle:
    return store.handle(store.fork(handle.run))


def contents(store: LatentStore, handles: list[Handle | None]) -> list[bytes | None]:
    return [None if handle is None else stored(store, handle) for handle in handles]


# Contents.


def test_equal_bytes_are_one_block(store: LatentStore) -> None:
    one, two, other = sealed(store, 1), sealed(store, 1), sealed(store, 2)
    assert one.offset == two.offset != other.offset
    assert one != two
    assert store.books()["device"].live == 2 * NBYTES
    assert store.counters()["shares"] == 1
    assert match(store, [content_name("a", content_hash(memoryview(content(1))))])[0].offset == one.offset


def test_tenants_never_share(store: LatentStore) -> None:
    one, two = sealed(store, 1, "a"), sealed(store, 1, "b")
    assert one.offset != two.offset
    three, four = sealed(store, 2, "a", b"key"), sealed(store, 2, "b", b"key")
    assert three.offset != four.offset
    assert store.counters()["shares"] == 0
    assert match(store, [caller_name("c", b"key")]) == [None]
    assert fetch(store, [caller_name("c", b"key")]) == [None]


def test_the_same_key_with_other_bytes_is_a_collision(store: LatentStore) -> None:
    """The same tokens computed in another context."""
    one, two = sealed(store, 1, key=b"tokens"), sealed(store, 2, key=b"tokens")
    assert (stored(store, one), stored(store, two)) == (content(1), content(2))
    assert store.counters()["dedup_collisions"] == 1
    assert contents(store, match(store, [caller_name("a", b"tokens")])) == [content(1)]
    store.free(two.run)
    assert store.books()["device"].live == NBYTES  # nobody could find it: it is gone with its reference


def test_contents_forced_to_one_hash(tmp_path: Path) -> None:
    with LatentStore(config(tmp_path), hasher=lambda _: b"same") as store:
        handles = [sealed(store, number) for number in (1, 2, 1, 3)]
        assert contents(store, handles) == [content(number) for number in (1, 2, 1, 3)]
        assert (store.counters()["dedup_collisions"], store.counters()["shares"]) == (2, 1)


def test_a_key_of_the_caller_is_no_hash_and_is_not_empty(store: LatentStore) -> None:
    digest = content_hash(memoryview(content(1)))
    assert caller_name("a", digest) != content_name("a", digest)
    with pytest.raises(StoreError, match="content key is empty"):
        store.seal(opened(store, "a"), key=b"")


def test_names_are_the_same_by_namespace_and_key_alone() -> None:
    parts = [(space, key) for space in ("a", "ab", "é", "文") for key in (b"=", b"b=", b"\xe9", b"\xc3\xa9", bytes(9))]
    made = [Name(*part) for part in parts]
    assert [(name.namespace, name.key) for name in made] == parts
    assert len(set(made)) == len(parts)
    assert {name: number for number, name in enumerate(made)} == {Name(*part): n for n, part in enumerate(parts)}


def test_a_commit_looks_at_no_bytes(store: LatentStore) -> None:
    runs = [store.allocate("a"), store.allocate("a", 3)]
    store.commit(runs[0], names(range(1)))
    one = store.handle(runs[0])
    assert stored(store, one) == bytes(NBYTES)  # what was never written is zero when it is read
    store.commit(runs[1], [*names(range(1)), *names(range(2))])  # twice the same, and one that is not there yet
    assert [handle.offset == one.offset for handle in store.handles(runs[1])] == [True, True, False]
    assert (store.counters()["installs"], store.counters()["shares"]) == (2, 2)
    store.commit(runs[1], names(range(1)), 1)  # it is that already
    for wrong, start in ((names(range(1)), 2), (names(range(2)), 2), (names(range(1)), -1), (names(range(4)), 0)):
        with pytest.raises(BlockStateError):
            store.commit(runs[1], wrong, start)
    with pytest.raises(BlockStateError, match="namespace 'a', its name is not"):
        store.commit(store.allocate("a"), [caller_name("b", b"0")])
    forked = store.allocate("a")
    store.fork(forked)
    with pytest.raises(BlockStateError, match="2 references"):
        store.commit(forked, names(range(5, 6)))


def test_a_run_is_found_filled_up_grows_and_forks(store: LatentStore) -> None:
    cached(store, range(0, 4, 2))
    run, missing = store.match(names(range(3)))
    assert missing == [1]
    assert stored(store, store.handle(run, 2)) == content(2)
    for use in (lambda: store.handle(run, 1), lambda: store.handles(run), lambda: store.commit(run, names(range(3)))):
        with pytest.raises(BlockStateError, match=r"block 1 of .* not there yet"):
            use()
    with pytest.raises(BlockStateError, match="not there yet"):
        store.fork(run)
    start = store.fork(run, 1)
    store.open(run, "a", 1)
    found, own, behind = store.handles(run)[:2], store.handle(run, 1), store.handle(run, 3)
    assert found[0].offset == store.handle(start).offset
    for handle in (own, behind):
        assert stored(store, handle) == b""
        store.append(handle, tensor(content(7)))
    store.commit(run, names(range(3)))
    fork = store.fork(run, 3)
    own = store.writable(store.handle(fork, 1))  # a copy in the middle; its neighbours are what they were
    places = [handle.offset for handle in store.handles(run)]
    assert [handle.offset for handle in store.handles(fork)] == [places[0], own.offset, places[2]]
    assert own.offset not in places
    counters = store.counters()
    assert [counters[name] for name in ("hits", "misses", "allocations", "forks", "copies")] == [2, 1, 4, 4, 1]
    for number in (4, -1):
        with pytest.raises(StaleHandleError, match="none with the number"):
            store.handle(run, number)
    for count in (5, -1):
        with pytest.raises(BlockStateError):
            store.fork(run, count)
    store.free(run)
    store.free(fork)
    assert store.counters()["frees"] == 2 + 4 + 3
    for use in (
        store.free,
        store.fork,
        store.handles,
        lambda run: store.open(run, "a"),
        lambda run: store.commit(run, []),
    ):
        with pytest.raises(StaleHandleError):
            use(run)


def test_a_run_that_finds_no_room_takes_nothing(tmp_path: Path) -> None:
    with LatentStore(config(None, device=5, host=0)) as store:
        cached(store, range(3))
        run, missing = store.match(names(range(1, 5)))
        assert missing == [2, 3]
        with pytest.raises(PoolFullError, match="4 device blocks are asked for and 3 can be had: 2 of 5 are in use"):
            store.open(run, "a", 2)
        assert (store.room(), store.counters()["evictions_device"]) == (3, 0)
        store.open(run, "a", 1)
        assert len(store.handles(run)) == 5
        assert store.room() == 0
        assert store.recount() == []
        with pytest.raises(PoolFullError):
            store.allocate("a", 1)
        with pytest.raises(BlockStateError):
            store.allocate("a", -1)
        store.allocate("a", 0)


def test_recycled_memory_is_never_read(store: LatentStore) -> None:
    for handle in [sealed(store, number, "b") for number in range(5)]:
        store.free(handle.run)
    store.shrink(5)
    assert store.drain()
    handle = opened(store, "a")
    assert stored(store, handle) == b""
    store.append(handle, tensor(b"xy"))
    assert stored(store, handle) == b"xy"
    assert stored(store, store.seal(handle).handle) == b"xy" + bytes(NBYTES - 2)


# Writing.


def test_copy_on_write(store: LatentStore) -> None:
    handle = opened(store, "a")
    store.append(handle, tensor(b"abc"))
    assert store.writable(handle) == handle
    forked = fork(store, handle)
    for shared in (handle, forked):
        with pytest.raises(BlockStateError, match="2 references"):
            store.append(shared, tensor(b"d"))
    own = store.writable(forked)
    assert own.offset != handle.offset
    store.append(own, tensor(b"d"))
    store.append(handle, tensor(b"e"))
    assert (stored(store, handle), stored(store, own)) == (b"abce", b"abcd")
    with pytest.raises(MovedHandleError):
        store.view(forked)


def test_content_that_others_may_find_is_copied_before_it_is_written(store: LatentStore) -> None:
    handle = sealed(store, 1)
    own = store.writable(handle)
    assert own.offset != handle.offset
    store.fill(own)[0] = 255
    [found] = match(store, [content_name("a", content_hash(memoryview(content(1))))])
    assert stored(store, found) == content(1)
    again = store.writable(store.seal(own).handle)
    assert stored(store, again)[0] == 255


def test_a_block_takes_no_more_than_it_holds_and_nothing_once_sealed(store: LatentStore) -> None:
    handle = opened(store, "a")
    store.append(handle, tensor(bytes(NBYTES - 1)))
    with pytest.raises(BlockStateError, match=f"2 bytes do not fit behind {NBYTES - 1} of {NBYTES}"):
        store.append(handle, tensor(b"xy"))
    handle = store.seal(handle).handle
    for use in (store.fill, store.seal, lambda h: store.append(h, tensor(b""))):
        with pytest.raises(BlockStateError, match="is sealed"):
            use(handle)
    with pytest.raises(BlockStateError, match="is sealed under another name"):
        store.commit(handle.run, names(range(1)))


# Handles.


def test_use_after_free_and_double_free(store: LatentStore) -> None:
    handle = sealed(store, 1)
    other = fork(store, handle)
    store.free(handle.run)
    for use in (store.view, store.writable, store.promote, store.demote, lambda _: store.check([other, handle])):
        with pytest.raises(StaleHandleError, match="run 1 was freed"):
            use(handle)
    for use in (store.free, store.fork, store.handles):
        with pytest.raises(StaleHandleError, match="run 1 was freed"):
            use(handle.run)
    assert stored(store, other) == content(1)  # the other holder's reference was not touched


def test_handles_of_another_store_and_of_none(store: LatentStore, tmp_path: Path) -> None:
    with LatentStore(config(None)) as other:
        foreign = sealed(other, 1)
        sealed(store, 2)
        for use in (lambda h: store.free(h.run), store.view, lambda h: store.fork(h.run)):
            with pytest.raises(ForeignHandleError, match="not issued by this store"):
                use(foreign)
    for forged in (
        Handle(DEVICE, 0, NBYTES, Run(0)),
        Handle(7, -1, 1 << 60, Run(1 << 200)),
        Handle(ARENA, 0, 8, Run(-1)),
    ):
        with pytest.raises(ForeignHandleError):
            store.view(forged)
    mine = sealed(store, 3)
    for forged in (mine._replace(offset=mine.offset + 1), mine._replace(region=9), mine._replace(length=1 << 40)):
        with pytest.raises(MovedHandleError):
            store.view(forged)


def test_a_handle_into_a_demoted_place(store: LatentStore) -> None:
    handle = sealed(store, 1)
    assert store.demote(handle)
    assert store.drain()
    for use in (store.view, store.writable, store.fill):
        with pytest.raises(MovedHandleError, match="in the host pool by now"):
            use(handle)
    sealed(store, 2)  # takes the place
    back = store.promote(handle)
    assert stored(store, back) == content(1)
    assert back.offset != handle.offset
    with pytest.raises(MovedHandleError, match="another place of the device pool"):
        store.view(handle)


def test_a_demotion_is_for_who_asked(store: LatentStore) -> None:
    """Who finds the block after its owner freed it keeps it, although the worker comes to the demotion later."""
    gate = threading.Event()
    store._tiers._worker.submit(Job(gate.wait))
    handle = sealed(store, 1, key=b"1")
    assert store.demote(handle)
    store.free(handle.run)
    [found] = match(store, [caller_name("a", b"1")])
    gate.set()
    assert store.drain()
    assert stored(store, found) == content(1)


def test_a_demotion_is_of_the_block_that_was_there(store: LatentStore) -> None:
    """What a run holds in its place by the time the worker comes to it is nobody's to demote."""
    gate = threading.Event()
    store._tiers._worker.submit(Job(gate.wait))
    handle, other = sealed(store, 1), sealed(store, 2)
    assert store.demote(handle)
    adopted = store.adopt(handle.run, 0, other)
    store.free(other.run)
    gate.set()
    assert store.drain()
    assert stored(store, adopted) == content(2)
    assert not store._moves.asked


def test_a_demoted_block_without_a_name_is_written_to_as_a_copy(tmp_path: Path) -> None:
    with LatentStore(config(tmp_path, device=2, disk=0), hasher=lambda _: b"same") as store:
        one, collided = sealed(store, 1), sealed(store, 2)
        store.demote(collided)
        assert store.drain()
        below = store.handle(collided.run)
        assert below.region == HOST
        taken = opened(store, "a")
        with pytest.raises(PoolFullError):
            store.writable(below)
        assert stored(store, below) == content(2)
        store.free(taken.run)
        copy = store.writable(below)
        store.fill(copy)[:1] = 77
        assert stored(store, copy) == bytes([77]) + content(2)[1:]
        assert store.books()["host"].live == 0
        assert stored(store, one) == content(1)
        assert store.recount() == []


def test_equal_bytes_bring_a_demoted_block_back(store: LatentStore) -> None:
    handle = sealed(store, 1)
    store.demote(handle)
    assert store.drain()
    again = sealed(store, 1)
    assert stored(store, again) == content(1)
    assert store.counters()["shares"] == 1
    assert store.promote(handle).offset == again.offset


# Room.


def test_a_full_pool_is_a_clear_error(tmp_path: Path) -> None:
    with LatentStore(config(None, device=2, host=0)) as store:
        one, two = sealed(store, 1, key=b"1"), sealed(store, 2)
        for take in (lambda: opened(store, "a"), lambda: store.writable(one)):
            with pytest.raises(
                PoolFullError, match="1 device blocks are asked for and 0 can be had: 2 of 2 are in use"
            ):
                take()
        assert contents(store, [one, two]) == [content(1), content(2)]
        store.free(one.run)
        opened(store, "a")
        assert match(store, [caller_name("a", b"1")]) == [None]
        assert store.counters()["dropped"] == 1
        assert store.recount() == []


def test_background_reclaim_keeps_what_leaves(store: LatentStore) -> None:
    cached(store, range(10))
    assert store.counters()["dropped"] == store.counters()["evictions_device"] == 0
    found = fetch(store, names(range(5, 10)))
    assert contents(store, found) == [content(number) for number in range(5, 10)]
    assert store.counters()["hits_below"] > 0


def test_prefetch_brings_blocks_up_without_a_reference(store: LatentStore) -> None:
    cached(store, range(8))
    assert match(store, names(range(1))) == [None]
    assert store.prefetch(names(range(1))) == 1
    assert store.drain()
    assert contents(store, match(store, names(range(1)))) == [content(0)]


def test_restart_from_disk(tmp_path: Path) -> None:
    with LatentStore(config(tmp_path, disk=20)) as store:
        cached(store, range(8))
        assert store.flush()
        assert store.books()["disk"].live == 8 * store._disk.file_bytes
    with LatentStore(config(tmp_path, disk=20)) as store:
        assert contents(store, fetch(store, names(range(5)))) == [content(number) for number in range(5)]
    with LatentStore(config(tmp_path, disk=20, layout=b"other")) as store:
        assert fetch(store, names(range(5))) == [None] * 5


def test_pins_and_leases(tmp_path: Path) -> None:
    now = [0.0]
    with LatentStore(config(None, device=3, host=0), clock=lambda: now[0]) as store:
        cached(store, range(3))
        assert store.pin(names(range(1))[0])
        assert store.pin(names(range(1))[0])
        assert store.lease(names(range(2))[1], 10.0)
        assert not store.pin(caller_name("a", b"unknown"))
        assert not store.lease(caller_name("b", b"1"), 10.0)
        held = [opened(store, "a")]  # only 2 could leave
        with pytest.raises(PoolFullError):
            opened(store, "a")
        assert store.lease(names(range(2))[1], 5.0)  # shorter than what is left: nothing changes
        now[0] = 9.0
        with pytest.raises(PoolFullError):
            opened(store, "a")
        assert store.lease(names(range(2))[1], 6.0)
        now[0] = 14.0
        with pytest.raises(PoolFullError):
            opened(store, "a")
        now[0] = 15.0
        held.append(opened(store, "a"))
        store.unpin(names(range(1))[0])
        with pytest.raises(PoolFullError):
            opened(store, "a")
        store.unpin(names(range(1))[0])
        with pytest.raises(BlockStateError, match="unpinned more often"):
            store.unpin(names(range(1))[0])
        held.append(opened(store, "a"))
        assert match(store, names(range(3))) == [None] * 3
        assert store.recount() == []


def test_pinned_and_leased_blocks_are_not_demoted(store: LatentStore) -> None:
    cached(store, range(2))
    assert store.pin(names(range(1))[0])
    assert store.lease(names(range(2))[1], 1000.0)
    assert store.shrink(5)
    assert store.drain()
    found = match(store, names(range(2)))
    assert contents(store, found) == [content(0), content(1)]
    for handle in found:
        with pytest.raises(BlockStateError, match="pinned or leased"):
            store.demote(handle)


def test_the_cost_aware_policy_keeps_what_is_dear(tmp_path: Path) -> None:
    with LatentStore(config(None, device=4, host=0, eviction="cost")) as store:
        for number, cost in enumerate((100.0, 1.0, 1.0, 1.0)):
            handle = opened(store, "a")
            store.append(handle, tensor(content(number)))
            store.free(store.seal(handle, key=b"%d" % number, cost=cost).handle.run)
        for _ in range(3):
            opened(store, "a")
        assert [handle is not None for handle in match(store, names(range(4)))] == [True, False, False, False]


def test_arenas(store: LatentStore) -> None:
    with store.arena() as arena, store.arena() as other:
        with pytest.raises(PoolFullError, match="all 2 arenas are in use"):
            store.arena()
        one, two = arena.allocate(10), arena.allocate(20)
        assert (one.region, two.offset - one.offset) == (ARENA, 16)
        arena.view(two).fill_(0)
        arena.view(one).fill_(7)
        assert arena.view(two).tolist() == [0] * 20
        with pytest.raises(ArenaFullError, match="17 bytes do not fit into an arena of 64 bytes that has 16 left"):
            arena.allocate(17)
        with pytest.raises(ArenaFullError):
            arena.allocate(0)
        arena.allocate(16)
        for use in (lambda: other.view(one), lambda: arena.view(one._replace(length=64)), lambda: store.view(one)):
            with pytest.raises(StaleHandleError):
                use()
        assert store.books()["arena"].live == 2 * 64
        assert store.recount() == []
    for use in (lambda: arena.view(one), lambda: arena.allocate(1), arena.close):
        with pytest.raises(StaleHandleError, match="request has ended"):
            use()
    with store.arena() as arena:
        assert len(arena.view(arena.allocate(64))) == 64
    assert store.books()["arena"].live == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"block_bytes": 0},
        {"block_bytes": 12},
        {"device_bytes": NBYTES - 1},
        {"host_bytes": -1},
        {"arenas": -1},
        {"queue": 0},
        {"disk_bytes": 100, "disk_folder": None},
        {"eviction": "fifo"},
    ],
)
def test_sizes_that_cannot_be(changes: dict) -> None:
    with pytest.raises(ConfigError):
        StoreConfig(**({"layout": b"l", "block_bytes": NBYTES, "device_bytes": 4 * NBYTES} | changes))


# A disk that fails, hangs or lies.


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_takes_nothing(store: LatentStore, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """What fits into memory stays there, the rest is dropped and counted; nothing fails."""

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", fail)
        cached(store, range(20))
    counters = store.counters()
    assert counters["io_errors"] > 0
    assert counters["dropped"] == 20 - 4 - 3  # one device block is kept free
    assert store.books()["disk"].live == 0
    assert contents(store, fetch(store, names(range(16, 20)))) == [content(at) for at in range(16, 20)]
    assert store.flush()
    assert store.books()["disk"].live > 0


def test_damage_on_disk_is_a_miss(store: LatentStore, tmp_path: Path) -> None:
    cached(store, range(3))
    assert store.flush()
    files = list(tmp_path.glob("disk/*/blocks/*"))
    for path in files:
        flip(path, 100)
    with LatentStore(config(tmp_path / "disk")) as again:
        assert fetch(again, names(range(3))) == [None] * 3
        assert again.counters()["disk_quarantined"] == 3
        assert again.counters()["misses"] == 3
        assert again.recount() == []
    store._disk.refresh()


def test_no_caller_waits_for_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a write hangs, everything but moves goes on; requests to move are refused once the queue is full."""
    hangs, go = threading.Event(), threading.Event()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        hangs.set()
        assert go.wait(60)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with LatentStore(config(tmp_path, device=6, host=0, queue=2)) as store:
        for number in range(6):
            store.free(sealed(store, number, key=b"%d" % number).run)
        assert hangs.wait(60)
        kept = sealed(store, 50, key=b"50")
        for number in range(60, 80):
            store.free(sealed(store, number, key=b"%d" % number).run)
            assert contents(store, match(store, [caller_name("a", b"50")])) == [content(50)]
        store.free(store.fork(kept.run))
        while store.shrink(1):
            pass
        assert store.prefetch(names(range(3))) == 0
        assert store.counters()["evictions_device"] > 0
        assert not store.drain(0.01)
        assert fetch(store, names(range(3)), timeout_s=0.01) == [None] * 3
        go.set()
        assert store.drain()
        assert store.recount() == []


def test_whoever_gives_up_waiting_leaves_no_reference(store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(store, range(8))
    go = threading.Event()
    real = os.preadv

    def preadv(descriptor: int, buffers: list, at: int) -> int:
        assert go.wait(60)
        return real(descriptor, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    [missing] = [name for name in names(range(1)) if match(store, [name]) == [None]]
    assert fetch(store, [missing], timeout_s=0.05) == [None]
    go.set()
    assert store.drain()
    assert store._table.runs == {}
    assert contents(store, fetch(store, [missing])) == [content(0)]


def test_a_place_that_cannot_be_written_is_quarantined(store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = sealed(store, 1)
    real = Pool.row

    def row(pool: Pool, slot: int) -> torch.Tensor:
        if pool is store._host:
            raise RuntimeError("an accelerator fails")
        return real(pool, slot)

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "row", row)
        assert store.demote(handle)
        assert store.drain()
    assert stored(store, handle) == content(1)
    book = store.books()["host"]
    assert (book.quarantined, book.live) == (NBYTES, 0)
    assert store.counters()["copy_errors"] == 1
    assert store.recount() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_ours_on_the_worker_lets_nobody_wait(store: LatentStore) -> None:
    cached(store, range(8))
    started, gate = threading.Event(), threading.Event()

    def fail() -> None:
        started.set()
        gate.wait(60)
        raise ValueError("a mistake")

    store._tiers._worker.submit(Job(fail))
    assert started.wait(60)
    waiting: list[list[Handle | None]] = []
    thread = threading.Thread(target=lambda: waiting.append(fetch(store, names(range(1)))))
    thread.start()
    while not store._tiers._worker._jobs:
        pass
    gate.set()
    thread.join(30)
    assert waiting == [[None]]
    with pytest.raises(StoreError, match="closed, or its worker has failed"):
        store.shrink(1)
    store._tiers._worker.drain = lambda _: True  # for the fixture: no worker is left to wait for


# What callers do while a move runs.


def during_the_next_copy(store: LatentStore, patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act on the worker's thread, between the copy of a block and what the worker makes of it."""
    real = store._moves._copy

    def copy(*arguments: object) -> bool:
        patch.setattr(store._moves, "_copy", real)
        copied = real(*arguments)
        act()
        return copied

    patch.setattr(store._moves, "_copy", copy)


def test_a_block_evicted_while_it_is_demoted(store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.free(sealed(store, 1, key=b"1").run)
    during_the_next_copy(store, monkeypatch, lambda: [opened(store, "a") for _ in range(5)])
    assert store.shrink(1)
    assert store.drain()
    assert store.books()["host"].live == 0
    assert fetch(store, names(range(1, 2))) == [None]


def test_a_block_evicted_and_overwritten_while_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LatentStore(config(tmp_path, device=2, host=0)) as store:
        kept = sealed(store, 0)
        with monkeypatch.context() as patch:
            real = Pool.row

            def row(pool: Pool, slot: int) -> torch.Tensor:
                if threading.current_thread().name == "redknot-latents":
                    patch.setattr(Pool, "row", real)
                    sealed(store, 2)
                return real(pool, slot)

            patch.setattr(Pool, "row", row)
            store.free(sealed(store, 1, key=b"1").run)
            store.shrink(1)
            assert store.drain()
        assert store.books()["disk"].live == 0
        store.free(kept.run)
        assert fetch(store, names(range(1, 2))) == [None]
        assert store.recount() == []


def test_a_block_matched_while_it_is_demoted(store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.free(sealed(store, 1, key=b"1").run)
    found: list[Handle | None] = []
    during_the_next_copy(store, monkeypatch, lambda: found.extend(match(store, names(range(1, 2)))))
    assert store.shrink(1)
    assert store.drain()
    assert contents(store, found) == [content(1)]


@pytest.mark.parametrize("during", [True, False])
def test_a_block_written_again_after_it_was_demoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: bool
) -> None:
    """A block without a name may be opened again: no copy of its old bytes may survive that."""
    with LatentStore(config(tmp_path, disk=0), hasher=lambda _: b"same") as store:
        sealed(store, 1)
        handle = sealed(store, 2)  # collides: it has no name

        def write_again() -> None:
            assert store.writable(handle) == handle
            store.fill(handle).copy_(tensor(content(3)))
            assert store.seal(handle, key=b"3") == (handle, Outcome.INSTALLED)

        if during:
            during_the_next_copy(store, monkeypatch, write_again)
            store.demote(handle)
            assert store.drain()
        else:
            store.demote(handle)
            assert store.drain()
            handle = store.promote(handle)
            assert store.books()["host"].live == NBYTES  # both pools hold it
            write_again()
        assert store.books()["host"].live == 0
        store.free(handle.run)
        store.shrink(5)
        assert store.drain()
        assert contents(store, fetch(store, names(range(3, 4)))) == [content(3)]
        assert store.recount() == []


def test_a_content_sealed_while_it_is_read_from_disk(store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(store, range(8))
    assert match(store, names(range(1))) == [None]
    made: list[Handle] = []
    during_the_next_copy(store, monkeypatch, lambda: made.append(sealed(store, 0, key=b"0")))
    [found] = fetch(store, names(range(1)))
    assert found.offset == made[0].offset
    assert contents(store, [found, *made]) == [content(0)] * 2


def test_a_content_sealed_while_it_is_promoted(store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = sealed(store, 1, key=b"1")
    store.demote(handle)
    assert store.drain()
    made: list[Handle] = []
    during_the_next_copy(store, monkeypatch, lambda: made.append(sealed(store, 1, key=b"1")))
    handle = store.promote(handle)
    assert handle.offset == made[0].offset
    assert stored(store, handle) == content(1)


def test_a_block_without_a_name_freed_while_it_is_promoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LatentStore(config(tmp_path), hasher=lambda _: b"same") as store:
        sealed(store, 1)
        collided = sealed(store, 2)
        store.demote(collided)
        assert store.drain()
        during_the_next_copy(store, monkeypatch, lambda: store.free(collided.run))
        with pytest.raises(StaleHandleError):
            store.promote(collided)
        assert store.recount() == []
        assert store.books()["host"].live == 0
        assert store.books()["device"].live == NBYTES


def test_what_came_from_disk_is_not_written_again(tmp_path: Path) -> None:
    with LatentStore(config(tmp_path, host=0)) as store:
        cached(store, range(5))
        assert store.flush()
        assert store.counters()["disk_writes"] == 5
        assert match(store, names(range(1))) == [None]
        [handle] = fetch(store, names(range(1)))
        store.free(handle.run)
        assert store.flush()
        assert (store.counters()["disk_writes"], store.counters()["disk_present"]) == (5, 0)


# The books.


def test_a_recount_finds_what_is_wrong(tmp_path: Path) -> None:
    def wrong(change: Callable[[LatentStore], object]) -> list[str]:
        with LatentStore(config(tmp_path)) as store:
            sealed(store, 1)
            store.free(sealed(store, 2).run)
            store.arena().allocate(8)
            assert store.flush()
            assert store.recount() == []
            change(store)
            return store.recount()

    def held(store: LatentStore) -> object:
        return next(iter(store._table.runs.values())).blocks[0]

    assert "references of a block" in wrong(lambda s: setattr(held(s), "refs", 2))[0]
    assert "device slots held" in wrong(lambda s: s._device.slots.take())[0]
    assert "device slots free" in wrong(lambda s: s._device.slots._free.pop())[0]
    assert "host bytes live" in " ".join(wrong(lambda s: setattr(held(s), "host", 1)))
    assert "name of a block" in wrong(lambda s: setattr(held(s), "name", None))[0]
    assert "may leave" in wrong(lambda s: setattr(held(s), "pins", 1) or s._table.policies[0].add(held(s), 1.0))[0]
    assert "found block is sealed" in wrong(lambda s: setattr(held(s), "sealed", False))[0]
    assert "arena slots held" in wrong(lambda s: s._arenas.open.clear())[0]
    assert "arena 0 bytes" in wrong(lambda s: setattr(s._arenas.open[0], "used", 9))[0]
    assert "disk blocks" in wrong(lambda s: s._disk._index.popitem())[0]
    assert "disk bytes quarantined" in wrong(lambda s: setattr(s._disk, "_quarantined", 5))[0]


# Threads.


def test_a_store_that_is_opened_in_inference_mode(tmp_path: Path) -> None:
    """The worker's thread is in no such mode, nor need callers be."""
    with torch.inference_mode():
        store = LatentStore(config(tmp_path))
    with store:
        for number in range(9):
            handle = opened(store, "a")
            with torch.inference_mode(bool(number % 2)):
                store.fill(handle).copy_(tensor(content(number)))
                store.free(store.seal(handle, key=b"%d" % number).handle.run)
            assert store.drain()
        assert contents(store, fetch(store, names(range(4)))) == [content(number) for number in range(4)]
        assert store.counters()["promotions_disk"]
        assert store.recount() == []


def test_a_store_that_was_closed_keeps_no_reference(tmp_path: Path) -> None:
    """Nobody gets the handles of a call that fails, so that nobody could free them."""
    store = LatentStore(config(tmp_path))
    cached(store, range(2))
    store.close()
    with pytest.raises(StoreError, match="closed"):
        fetch(store, names(range(9)))
    assert store._table.runs == {}
    held = [opened(store, "a") for _ in range(2)]
    for _ in range(2):  # the last place but those of what is cached: demotions are due
        with pytest.raises(StoreError, match="closed"):
            opened(store, "a")
    assert len(store._table.runs) == len(held)
    assert store.recount() == []


def test_threads(tmp_path: Path) -> None:
    """Four threads over the same contents, with pools so small that everything moves all the time."""
    errors: list[BaseException] = []

    with LatentStore(config(tmp_path, device=16, host=6, disk=12)) as store:

        def work(seed: int) -> None:
            try:
                for step in range(200):
                    number = (step * 7 + seed * 3) % 24
                    [found] = fetch(store, names(range(number, number + 1)))
                    handle = sealed(store, number, key=b"%d" % number) if found is None else found
                    assert stored(store, handle) == content(number)
                    other = fork(store, handle)
                    store.free(handle.run)
                    own = store.writable(other)
                    store.fill(own)[:4] = torch.tensor([seed, step % 256, 1, 2])
                    own = store.seal(own).handle
                    assert stored(store, own)[4:] == content(number)[4:]
                    if step % 3 == 0:
                        store.demote(own)
                        own = store.promote(own)
                        assert stored(store, own)[4:] == content(number)[4:]
                    store.free(own.run)
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert store.drain()
        assert store.recount() == []
        assert store._table.runs == {}
        assert store.counters()["dedup_collisions"] == 0


def test_threads_that_seal_the_same_at_once(store: LatentStore) -> None:
    handles: list[Handle] = []
    for number in range(20):
        barrier = threading.Barrier(2)

        def work(number: int = number, barrier: threading.Barrier = barrier) -> None:
            handle = opened(store, "a")
            store.append(handle, tensor(content(number)))
            barrier.wait()
            handles.append(store.seal(handle).handle)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        one, two = handles[-2:]
        assert one.offset == two.offset
        store.free(one.run)
        store.free(two.run)
    assert (store.counters()["installs"], store.counters()["shares"]) == (20, 20)
