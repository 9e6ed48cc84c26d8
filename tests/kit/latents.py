"""A latent store beside a model of it that is nothing but dictionaries: every operation is done to both.

Operations take numbers and map them onto what is there, so that a state machine or dice can choose them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from redknot.latents.content import Name, caller_name, content_hash, content_name
from redknot.latents.diskfile import PREFIX_BYTES
from redknot.latents.handles import (
    BlockStateError,
    ForeignHandleError,
    Handle,
    MovedHandleError,
    PoolFullError,
    StaleHandleError,
)
from redknot.latents.settings import StoreConfig
from redknot.latents.store import LatentStore

NBYTES = 32
NAMESPACES = ("a", "b")
LEASE_S = 10.0


def config(folder: Path | None, *, device: int = 5, host: int = 3, disk: int = 6, **changes: object) -> StoreConfig:
    """Budgets counted in blocks."""
    made = StoreConfig(
        b"layout",
        NBYTES,
        device * NBYTES,
        host * NBYTES,
        disk * (PREFIX_BYTES + NBYTES) if folder else 0,
        folder,
        arena_bytes=64,
        arenas=2,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def content(number: int) -> bytes:
    return bytes((number * 37 + at) % 256 for at in range(NBYTES))


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def stored(store: LatentStore, handle: Handle) -> bytes:
    return store.view(handle).numpy().tobytes()


@dataclass(eq=False)
class Cell:
    """A block of the model."""

    namespace: str
    data: bytes = b""
    sealed: bool = False
    name: Name | None = None
    demoted: bool = False  # asked for; whether it happened is the store's business


@dataclass(eq=False)
class Mirror:
    """A store, and what it must hold."""

    make: Callable[[], LatentStore]
    now: list[float]
    hasher: Callable[[memoryview], bytes] = content_hash
    contents: int = 6
    keys: int = 3
    cells: dict[Handle, Cell] = field(default_factory=dict)
    dead: list[Handle] = field(default_factory=list)
    sealed: dict[Name, set[bytes]] = field(default_factory=dict)  # all that was ever installed under a name
    pins: dict[Name, int] = field(default_factory=dict)
    leases: dict[Name, float] = field(default_factory=dict)
    before: Counter[str] = field(default_factory=Counter)  # counters of the stores before the last restart

    def __post_init__(self) -> None:
        self.store = self.make()

    # Choosing.

    def pick(self, number: int, wanted: Callable[[Cell], bool] = lambda _: True) -> Handle | None:
        found = [handle for handle, cell in self.cells.items() if wanted(cell)]
        return found[number % len(found)] if found else None

    def pick_open(self, number: int) -> Handle | None:
        return self.pick(number, lambda cell: not cell.sealed and self.references(cell) == 1)

    def pick_name(self, number: int) -> Name | None:
        return list(self.sealed)[number % len(self.sealed)] if self.sealed else None

    def references(self, cell: Cell) -> int:
        return sum(other is cell for other in self.cells.values())

    def held(self) -> int:
        """Device blocks that must not leave, at most."""
        referenced = set(self.cells.values())
        names = {cell.name for cell in referenced}
        kept = {name for name, count in self.pins.items() if count}
        kept |= {name for name, until in self.leases.items() if until > self.now[0]}
        return len(referenced) + len(kept - names)

    def full(self) -> bool:
        """Whether the device pool may have no room for another block."""
        return self.held() >= self.store.config.device_bytes // NBYTES

    def if_room(self, take: Callable[[], Handle]) -> Handle | None:
        """Take a block, or None where the model says that there may be none; moves that still run hold some, too."""
        try:
            return take()
        except PoolFullError:
            assert self.store.drain()
            return None if self.full() else take()

    # Operations.

    def allocate(self, number: int) -> None:
        namespace = NAMESPACES[number % len(NAMESPACES)]
        handle = self.if_room(lambda: self.store.allocate(namespace))
        if handle is not None:
            self.cells[handle] = Cell(namespace)

    def append(self, number: int, length: int, byte: int) -> None:
        handle = self.pick_open(number)
        if handle is None:
            return
        cell = self.cells[handle]
        data = bytes([byte % self.contents]) * length
        if len(cell.data) + length > NBYTES:
            with pytest.raises(BlockStateError, match="do not fit"):
                self.store.append(handle, tensor(data))
        else:
            self.store.append(handle, tensor(data))
            cell.data += data

    def fill(self, number: int, which: int) -> None:
        handle = self.pick_open(number)
        if handle is not None:
            self.write(handle, content(which % self.contents))

    def write(self, handle: Handle, data: bytes) -> None:
        row = self.store.fill(handle)
        before = self.cells[handle].data
        assert row.numpy().tobytes() == before + bytes(NBYTES - len(before))
        row.copy_(tensor(data))
        self.cells[handle].data = data

    def seal(self, number: int, key: int | None) -> None:
        """Seal by content, or under one of a few keys."""
        handle = self.pick_open(number)
        if handle is None:
            return
        cell = self.cells[handle]
        cell.data += bytes(NBYTES - len(cell.data))
        if key is None:
            name = content_name(cell.namespace, self.hasher(memoryview(cell.data)))
        else:
            name = caller_name(cell.namespace, b"s%d" % (key % self.keys))
        chosen = None if key is None else b"s%d" % (key % self.keys)
        self._sealed(handle, name, lambda: self.store.seal(handle, key=chosen, cost=1.0 + number % 3))

    def commit(self, number: int, key: int) -> None:
        """Seal under a key that always stands for the same bytes."""
        handle = self.pick_open(number)
        if handle is None:
            return
        chosen = b"c%d" % (key % self.keys)
        self.write(handle, content(key % self.keys))
        self._sealed(
            handle, caller_name(self.cells[handle].namespace, chosen), lambda: self.store.commit(handle, chosen)
        )

    def _sealed(self, handle: Handle, name: Name, seal: Callable[[], Handle]) -> None:
        cell = self.cells[handle]
        before = self.store.counters()
        result = seal()
        after = self.store.counters()
        what = [key for key in ("installs", "shares", "dedup_collisions") if after[key] > before[key]]
        assert len(what) == 1
        others = [other for other in self.cells.values() if other.name == name]
        if others:
            assert what == ["shares" if others[0].data == cell.data else "dedup_collisions"]
        cell.sealed = True
        if what == ["dedup_collisions"]:
            assert self.sealed[name] != {cell.data}
        else:
            cell.name = name
            self.sealed.setdefault(name, set()).add(cell.data)
        if what == ["shares"]:
            del self.cells[handle]
            self.dead.append(handle)
            self.cells[result] = others[0] if others else cell
        else:
            assert result == handle

    def fork(self, number: int) -> None:
        handle = self.pick(number)
        if handle is not None and self.readable(handle):
            self.cells[self.store.fork(handle)] = self.cells[handle]

    def writable(self, number: int) -> None:
        handle = self.pick(number)
        if handle is None or not self.readable(handle):
            return
        cell = self.cells[handle]
        alone = self.references(cell) == 1 and cell.name is None
        result = self.store.writable(handle) if alone else self.if_room(lambda: self.store.writable(handle))
        if result is None:
            return
        assert (result == handle) is alone
        if alone:
            cell.sealed = False
        else:
            del self.cells[handle]
            self.dead.append(handle)
            self.cells[result] = Cell(cell.namespace, cell.data)

    def free(self, number: int) -> None:
        handle = self.pick(number)
        if handle is not None:
            self.store.free(handle)
            del self.cells[handle]
            self.dead.append(handle)

    def misuse(self, number: int) -> None:
        """A dead handle is refused by everything, and a sealed or shared block takes no bytes."""
        if self.dead:
            handle = self.dead[number % len(self.dead)]
            uses = (self.store.free, self.store.view, self.store.fork, self.store.writable, self.store.fill)
            for use in (*uses, self.store.seal, self.store.demote, self.store.promote):
                with pytest.raises((StaleHandleError, ForeignHandleError)):
                    use(handle)
        handle = self.pick(number, lambda cell: cell.sealed or self.references(cell) > 1)
        if handle is not None and self.readable(handle):
            with pytest.raises(BlockStateError):
                self.store.append(handle, tensor(b"x"))
            with pytest.raises(BlockStateError):
                self.store.seal(handle)

    def find(self, number: int, *, fetch: bool) -> None:
        name = self.pick_name(number)
        if name is None:
            return
        [handle] = self.store.fetch([name]) if fetch else self.store.match([name])
        owners = [cell for cell in self.cells.values() if cell.name == name]
        if handle is not None:
            data = stored(self.store, handle)
            assert data in self.sealed[name]
            assert all(owner.data == data for owner in owners)
            self.cells[handle] = owners[0] if owners else Cell(name.namespace, data, sealed=True, name=name)
        elif owners and fetch:
            assert owners[0].demoted
            assert self.full()

    def prefetch(self, number: int) -> None:
        name = self.pick_name(number)
        if name is not None:
            self.store.prefetch([name])  # the queue may be full

    def pin(self, number: int, *, lease: bool) -> None:
        name = self.pick_name(number)
        if name is None:
            return
        if lease and self.store.lease(name, LEASE_S):
            self.leases[name] = self.now[0] + LEASE_S
        elif not lease and self.store.pin(name):
            self.pins[name] = self.pins.get(name, 0) + 1

    def unpin(self, number: int) -> None:
        name = self.pick_name(number)
        if name is not None and self.pins.get(name):
            self.store.unpin(name)
            self.pins[name] -= 1
        elif name is not None:
            with pytest.raises(BlockStateError):
                self.store.unpin(name)

    def later(self) -> None:
        self.now[0] += LEASE_S / 2

    def demote(self, number: int) -> None:
        handle = self.pick(number)
        if handle is None or not self.readable(handle):
            return
        cell = self.cells[handle]
        kept = cell.name and (self.pins.get(cell.name) or self.leases.get(cell.name, 0.0) > self.now[0])
        if cell.sealed and self.references(cell) == 1 and not kept:
            cell.demoted |= self.store.demote(handle)  # the queue may be full
        else:
            with pytest.raises(BlockStateError):
                self.store.demote(handle)

    def promote(self, number: int) -> None:
        handle = self.pick(number, lambda cell: cell.demoted) or self.pick(number)
        if handle is None:
            return
        cell = self.cells[handle]
        try:
            result = self.store.promote(handle)
        except PoolFullError:
            assert cell.demoted
            assert self.full()
            return
        del self.cells[handle]
        self.dead.append(handle)
        self.cells[result] = cell
        cell.demoted = self.references(cell) > 1 and cell.demoted  # the other handles still name the old place

    def restart(self) -> None:
        """What was flushed is found again; what was referenced or open is gone, and its handles are foreign."""
        assert self.store.flush()
        self.before.update(self.store.counters())
        self.store.close()
        self.store = self.make()
        self.dead = [*self.dead[-3:], *self.cells]
        self.cells.clear()
        self.pins.clear()
        self.leases.clear()

    # Checks.

    def readable(self, handle: Handle) -> bool:
        """Whether a handle still names the place of its block; only a demotion that was asked for may take it away."""
        if self.cells[handle].demoted:
            assert self.store.drain()
        try:
            self.store.view(handle)
        except MovedHandleError:
            assert self.cells[handle].demoted
            return False
        return True

    def check(self) -> None:
        """The books balance, every block has the model's bytes, and what the model tells apart lies apart."""
        assert self.store.drain()
        assert self.store.recount() == []
        for book in self.store.books().values():
            assert book.free >= 0
            assert book.free + book.live + book.quarantined == book.total
        places: dict[int, Cell] = {}
        for handle, cell in self.cells.items():
            if self.readable(handle):
                assert stored(self.store, handle) == cell.data
                assert places.setdefault(handle.offset, cell) is cell
