"""A latent store beside a model of it that is nothing but dictionaries: every operation is done to both.

Operations take numbers and map them onto what is there, so that a state machine or dice can choose them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from redknot.latents.content import Name, caller_name, content_hash, content_name
from redknot.latents.diskfile import PREFIX_BYTES
from redknot.latents.handles import (
    DEVICE,
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
from redknot.latents.settings import StoreConfig
from redknot.latents.store import LatentStore

T = TypeVar("T")

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


def opened(store: LatentStore, namespace: str) -> Handle:
    """The open block of a run of one."""
    return store.handle(store.allocate(namespace))


def there(store: LatentStore, found: Match, count: int) -> list[Handle | None]:
    """The handles of what was found of ``count`` names."""
    return [None if at in found.missing else store.handle(found.run, at) for at in range(count)]


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
    cells: dict[Handle, Cell] = field(default_factory=dict)  # every block of every run
    holes: dict[Run, tuple[str, list[int]]] = field(default_factory=dict)  # runs, their namespaces, what they lack
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

    def pick_run(self, number: int) -> Run | None:
        return list(self.holes)[number % len(self.holes)] if self.holes else None

    def of_run(self, run: Run) -> dict[Handle, Cell]:
        return {handle: cell for handle, cell in self.cells.items() if handle.run == run}

    def references(self, cell: Cell) -> int:
        return sum(other is cell for other in self.cells.values())

    def held(self) -> int:
        """Device blocks that must not leave, at most."""
        referenced = set(self.cells.values())
        names = {cell.name for cell in referenced}
        kept = {name for name, count in self.pins.items() if count}
        kept |= {name for name, until in self.leases.items() if until > self.now[0]}
        return len(referenced) + len(kept - names)

    def full(self, blocks: int = 1) -> bool:
        """Whether the device pool may have no room for so many blocks more."""
        return self.held() + blocks > self.store.config.device_bytes // NBYTES

    def if_room(self, take: Callable[[], T], blocks: int = 1) -> T | None:
        """Take blocks, or None where the model says that there may be none; moves that still run hold some, too."""
        try:
            return take()
        except PoolFullError:
            assert self.store.drain()
            return None if self.full(blocks) else take()

    # Operations.

    def allocate(self, number: int, blocks: int = 1) -> None:
        namespace = NAMESPACES[number % len(NAMESPACES)]
        run = self.if_room(lambda: self.store.allocate(namespace, blocks), blocks)
        if run is not None:
            self.holes[run] = (namespace, [])
            self.cells |= {handle: Cell(namespace) for handle in self.store.handles(run)}

    def open(self, number: int, more: int) -> None:
        """Fill a run up, and let it grow."""
        run = self.pick_run(number)
        if run is None:
            return
        namespace, holes = self.holes[run]
        blocks = len(holes) + more

        def fill_up() -> bool:
            self.store.open(run, namespace, more)
            return True

        if self.if_room(fill_up, blocks):
            behind = len(self.of_run(run)) + len(holes)
            for at in (*holes, *range(behind, behind + more)):
                self.cells[self.store.handle(run, at)] = Cell(namespace)
            self.holes[run] = (namespace, [])

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
        result, outcome = self.store.seal(handle, key=chosen, cost=1.0 + number % 3)
        others = [other for other in self.cells.values() if other.name == name]
        if others:
            assert outcome is (Outcome.SHARED if others[0].data == cell.data else Outcome.COLLIDED)
        if outcome is Outcome.COLLIDED:
            assert self.sealed[name] != {cell.data}
            cell.sealed = True
            assert result == handle
        else:
            self._sealed(handle, name)

    def commit(self, number: int, key: int, blocks: int = 1) -> None:
        """Seal some blocks of a run under keys that always stand for the same bytes."""
        first = self.pick_open(number)
        if first is None:
            return
        handles = {handle.number: handle for handle in self.of_run(first.run)}
        chosen: list[tuple[Handle, Name]] = []
        for at in range(first.number, first.number + blocks):
            handle = handles.get(at)
            if handle is None or self.cells[handle].sealed or self.references(self.cells[handle]) > 1:
                break
            which = (key + at) % self.keys
            self.write(handle, content(which))
            chosen.append((handle, caller_name(self.cells[handle].namespace, b"c%d" % which)))
        names = [name for _, name in chosen]
        before = self.store.counters()
        for _ in range(2):  # what is committed already stays as it is
            self.store.commit(first.run, names, first.number)
        after = self.store.counters()
        assert sum(after[what] - before[what] for what in ("installs", "shares")) == len(names)
        for handle, name in chosen:
            self._sealed(handle, name)

    def _sealed(self, handle: Handle, name: Name) -> None:
        """A block was installed under its name, or shares what is there."""
        cell = self.cells[handle]
        others = [other for other in self.cells.values() if other.name == name]
        cell.sealed, cell.name = True, name
        self.sealed.setdefault(name, set()).add(cell.data)
        self._replaced(handle, self.store.handle(handle.run, handle.number), others[0] if others else cell)

    def _replaced(self, handle: Handle, result: Handle, cell: Cell) -> None:
        """A block of a run is elsewhere by now, and perhaps another."""
        del self.cells[handle]
        self.cells[result] = cell
        if result != handle and handle.region == DEVICE:  # in the host pool a block may be, too
            with pytest.raises(MovedHandleError):
                self.store.view(handle)

    def fork(self, number: int, count: int) -> None:
        """All of a run, or its start."""
        run = self.pick_run(number)
        if run is None:
            return
        namespace, holes = self.holes[run]
        cells = self.of_run(run)
        size = len(cells) + len(holes)
        taken = None if count >= size else count
        if holes and (taken is None or holes[0] < taken):
            with pytest.raises(BlockStateError, match="not there yet"):
                self.store.fork(run, taken)
            return
        forked = self.store.fork(run, taken)
        self.holes[forked] = (namespace, [])
        for handle, cell in cells.items():
            if handle.number < (size if taken is None else taken):
                # Where the block was demoted, this handle names where it is, or was until a move that runs is done.
                self.cells[self.store.handle(forked, handle.number)] = cell

    def share(self, number: int, count: int) -> None:
        """Some blocks of any runs, perhaps one of them twice."""
        picked = [self.pick(number + 3 * at) for at in range(count)]
        handles = [handle for handle in picked if handle is not None and self.readable(handle)]
        run = self.store.share(handles)
        self.holes[run] = (NAMESPACES[number % len(NAMESPACES)], [])
        for at, handle in enumerate(handles):
            self.cells[self.store.handle(run, at)] = self.cells[handle]

    def adopt(self, number: int, other: int) -> None:
        """Another block in the place of one."""
        handle, wanted = self.pick(number), self.pick(other)
        if handle is not None and wanted is not None and self.readable(wanted):
            cell = self.cells[wanted]
            self._replaced(handle, self.store.adopt(handle.run, handle.number, wanted), cell)

    def writable(self, number: int) -> None:
        handle = self.pick(number)
        if handle is None or not self.readable(handle):
            return
        cell = self.cells[handle]
        alone = self.references(cell) == 1 and cell.name is None and handle.region == DEVICE
        result = self.store.writable(handle) if alone else self.if_room(lambda: self.store.writable(handle))
        if result is None:
            return
        assert (result == handle) is alone
        if alone:
            cell.sealed = False
        else:
            self._replaced(handle, result, Cell(cell.namespace, cell.data))

    def free(self, number: int) -> None:
        run = self.pick_run(number)
        if run is not None:
            self.store.free(run)
            self.forget(run)

    def forget(self, run: Run) -> None:
        del self.holes[run]
        gone = self.of_run(run)
        for handle in gone:
            del self.cells[handle]
        self.dead = [*self.dead[-50:], *gone]

    def misuse(self, number: int) -> None:
        """A dead handle is refused by everything, and a sealed or shared block takes no bytes."""
        if self.dead:
            handle = self.dead[number % len(self.dead)]
            uses = (self.store.view, self.store.writable, self.store.fill)
            for use in (*uses, self.store.seal, self.store.demote, self.store.promote):
                with pytest.raises((StaleHandleError, ForeignHandleError)):
                    use(handle)
            runs = (self.store.free, self.store.fork, self.store.handles, lambda run: self.store.open(run, "a", 1))
            live = self.pick(number)
            if live is not None:
                with pytest.raises((StaleHandleError, ForeignHandleError)):
                    self.store.adopt(live.run, live.number, handle)
            with pytest.raises((StaleHandleError, ForeignHandleError)):
                self.store.share([handle] if live is None or not self.readable(live) else [live, handle])
            for use_run in (*runs, lambda run: self.store.commit(run, [])):
                with pytest.raises((StaleHandleError, ForeignHandleError)):
                    use_run(handle.run)
        handle = self.pick(number, lambda cell: cell.sealed or self.references(cell) > 1)
        if handle is not None and self.readable(handle):
            with pytest.raises(BlockStateError):
                self.store.append(handle, tensor(b"x"))
            with pytest.raises(BlockStateError):
                self.store.seal(handle)

    def find(self, number: int, *, fetch: bool, count: int = 1) -> None:
        """Some names that the model knows; they may be the same, and their namespaces differ."""
        names = [name for at in range(count) if (name := self.pick_name(number + at)) is not None]
        if not names:
            return
        match = self.store.fetch(names) if fetch else self.store.match(names)
        self.holes[match.run] = (names[0].namespace, match.missing)
        lacking = False
        for name, handle in zip(names, there(self.store, match, len(names)), strict=True):
            owners = [cell for cell in self.cells.values() if cell.name == name]
            if handle is not None:
                data = stored(self.store, handle)
                assert data in self.sealed[name]
                assert all(owner.data == data for owner in owners)
                self.cells[handle] = owners[0] if owners else Cell(name.namespace, data, sealed=True, name=name)
            elif owners and fetch:
                assert owners[0].demoted
                lacking = True
        assert not lacking or self.full()

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
        self._replaced(handle, result, cell)
        cell.demoted = self.references(cell) > 1 and cell.demoted  # the other handles still name the old place

    def restart(self) -> None:
        """What was flushed is found again; what was referenced or open is gone, and its handles are foreign."""
        assert self.store.flush()
        self.before.update(self.store.counters())
        self.store.close()
        self.store = self.make()
        self.dead = [*self.dead[-3:], *self.cells]
        self.cells.clear()
        self.holes.clear()
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
        places: dict[tuple[int, int], Cell] = {}
        for handle, cell in self.cells.items():
            if self.readable(handle):
                assert stored(self.store, handle) == cell.data
                assert places.setdefault((handle.region, handle.offset), cell) is cell
