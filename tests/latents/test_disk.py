"""The disk tier under everything that disks, other processes and hostile files do."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from redknot.errors import StoreError
from redknot.latents.content import Name, address, caller_name, content_name
from redknot.latents.disk import DiskTier, Written
from redknot.latents.diskfile import PREFIX_BYTES
from tests.artifact.kit import Steps, flip, kill_self, run_child

NBYTES = 64
FILE = PREFIX_BYTES + NBYTES
CALLS = ("open", "fstat", "writev", "fsync", "rename", "unlink", "preadv", "utime")


def name(number: int, namespace: str = "a") -> Name:
    return caller_name(namespace, b"%d" % number)


def payload(number: int) -> memoryview:
    return memoryview(bytes((number * 31 + at) % 256 for at in range(NBYTES)))


def _address(number: int) -> bytes:
    return address(b"layout", name(number))


def read(tier: DiskTier, which: Name) -> bytes | None:
    into = bytearray(NBYTES)
    return None if tier.read(which, memoryview(into)) is None else bytes(into)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def opened(folder: Path, files: int = 20, layout: bytes = b"layout") -> DiskTier:
    return DiskTier(folder, layout, NBYTES, files * FILE)


def block_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/blocks/*"))


def balanced(tier: DiskTier) -> bool:
    book = tier.book()
    return tier.recount() == [] and book.free + book.live + book.quarantined == book.total


def test_what_is_written_is_read(folder: Path) -> None:
    tier = opened(folder)
    assert tier.write(name(1), payload(1), 2.5) is Written.STORED
    into = bytearray(NBYTES)
    assert tier.read(name(1), memoryview(into)) == 2.5
    assert into == payload(1)
    assert tier.holds(name(1))
    assert not tier.holds(name(2))
    assert read(tier, name(2)) is None
    assert tier.write(name(1), payload(1), 2.5) is Written.PRESENT
    assert tier.write(name(1), payload(2), 2.5) is Written.COLLIDED
    assert read(opened(folder), name(1)) == payload(1)
    assert tier.counts()["disk_collisions"] == 1
    assert balanced(tier)


def test_names_that_differ_in_anything_are_other_files(folder: Path) -> None:
    tier = opened(folder)
    names = [
        caller_name("a", b"bc"),
        caller_name("ab", b"c"),
        content_name("a", b"bc"),
        caller_name("a", b"#bc"),
        Name("a", b"bc"),
        caller_name("a", b"x=y"),
        caller_name("a=x", b"y"),
    ]
    for number, which in enumerate(names):
        assert tier.write(which, payload(number), 1.0) is Written.STORED
    other = opened(folder, layout=b"layout2")
    assert [read(other, which) for which in names] == [None] * len(names)
    assert [read(tier, which) for which in names] == [payload(number) for number in range(len(names))]


def test_folders_and_files_are_private(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    tier = opened(folder)
    tier.write(name(1), payload(1), 1.0)
    found = [folder, *folder.rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()} == {0o600}


def test_folders_that_cannot_be_used_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "file").write_text("")
    with pytest.raises(StoreError, match="cannot use folder"):
        opened(folder.parent / "file")
    folder.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match="belongs to user"):
        opened(folder)


def test_the_least_recently_used_leaves(folder: Path) -> None:
    tier = opened(folder, files=3)
    for number in range(3):
        tier.write(name(number), payload(number), 1.0)
    assert read(tier, name(0)) is not None
    tier.write(name(3), payload(3), 1.0)
    assert [tier.holds(name(number)) for number in range(4)] == [True, False, True, True]
    for number in (2, 0, 3):  # the order survives a restart: it is the time of the last use
        path = Path(tier._path(_address(number)))
        os.utime(path, ns=(0, number + 10))
    again = opened(folder, files=3)
    again.write(name(4), payload(4), 1.0)
    assert [again.holds(name(number)) for number in range(5)] == [False, False, True, True, True]
    assert again.counts()["disk_evictions"] == 1
    smaller = opened(folder, files=1)
    smaller.write(name(5), payload(5), 1.0)
    assert smaller.book().free == 0
    assert balanced(smaller)


def test_no_room_at_all(folder: Path) -> None:
    tier = DiskTier(folder, b"layout", NBYTES, FILE - 1)
    assert tier.write(name(1), payload(1), 1.0) is Written.REFUSED
    assert tier.counts()["disk_full"] == 1
    assert block_files(folder) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_disk_errors_at_every_step_of_a_write(folder: Path, number: int) -> None:
    tier = opened(folder)
    tier.write(name(0), payload(0), 1.0)
    for at in itertools.count():
        fired = []

        def fail(what: str, fired: list[str] = fired) -> None:
            fired.append(what)
            raise OSError(number, os.strerror(number))

        with pytest.MonkeyPatch.context() as patch:
            Steps(at, fail).install(patch, CALLS)
            written = tier.write(name(1), payload(1), 1.0)
        assert written in (Written.STORED, Written.REFUSED)
        assert read(tier, name(0)) == payload(0)
        assert read(tier, name(1)) == (payload(1) if written is Written.STORED else None)
        assert balanced(tier)
        if not fired:
            break
        assert tier.counts()["io_errors"] > 0
        for path in block_files(folder):
            if path.name.startswith(_address(1).hex()):
                path.unlink()
        tier.refresh()
    assert at > 5


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_disk_errors_at_every_step_of_a_read(folder: Path, number: int) -> None:
    tier = opened(folder)
    tier.write(name(0), payload(0), 1.0)
    misses = 0
    for at in itertools.count():
        fired = []

        def fail(what: str, fired: list[str] = fired) -> None:
            fired.append(what)
            raise OSError(number, os.strerror(number))

        with pytest.MonkeyPatch.context() as patch:
            Steps(at, fail).install(patch, CALLS)
            found = read(tier, name(0))
        assert found in (None, payload(0))
        misses += found is None
        assert read(tier, name(0)) == payload(0)
        if not fired:
            break
    assert misses == tier.counts()["io_errors"] == 4  # the time of use may fail to change
    assert tier.counts()["disk_quarantined"] == 0
    assert balanced(tier)


def test_sigkill_at_every_step_of_a_write(folder: Path) -> None:
    def killed(at: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            tier = opened(folder)
            Steps(at, kill_self).install(patch, CALLS)
            tier.write(name(1), payload(1), 1.0)

    for at in itertools.count():
        status = run_child(lambda at=at: killed(at))
        tier = opened(folder)
        assert read(tier, name(1)) in (None, payload(1))
        assert tier.counts()["disk_quarantined"] == 0
        assert balanced(tier)
        if not os.WIFSIGNALED(status):
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        for path in block_files(folder):
            path.unlink()
    assert at > 5
    assert read(opened(folder), name(1)) == payload(1)


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_writes_is_not(folder: Path) -> None:
    tier = opened(folder)

    def die_inside() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda _: kill_self(""))
            tier.write(name(1), payload(1), 1.0)

    run_child(die_inside)
    aside = folder.glob("*/aside/*")
    assert len(list(aside)) == 1
    with pytest.MonkeyPatch.context() as patch:
        real = os.fsync

        def look(descriptor: int) -> None:
            patch.setattr(os, "fsync", real)
            assert opened(folder).counts()["disk_left_over"] == 1
            real(descriptor)

        patch.setattr(os, "fsync", look)
        assert tier.write(name(2), payload(2), 1.0) is Written.STORED
    assert list(folder.glob("*/aside/*")) == []
    assert read(tier, name(2)) == payload(2)


def test_short_reads_and_writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_read = os.writev, os.preadv

    def writev(descriptor: int, buffers: list[memoryview]) -> int:
        return real_write(descriptor, [buffers[0][:7]])

    def preadv(descriptor: int, buffers: list[memoryview], at: int) -> int:
        return real_read(descriptor, [buffers[0][:5]], at)

    monkeypatch.setattr(os, "writev", writev)
    monkeypatch.setattr(os, "preadv", preadv)
    tier = opened(folder)
    assert tier.write(name(1), payload(1), 1.0) is Written.STORED
    assert read(tier, name(1)) == payload(1)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    assert read(tier, name(1)) is None
    assert tier.counts()["disk_quarantined"] == 1


DAMAGE: dict[str, Callable[[Path], None]] = {
    **{f"bit flipped in byte {at}": (lambda path, at=at: flip(path, at)) for at in range(0, FILE, 3)},
    **{f"cut to {length}": (lambda path, length=length: os.truncate(path, length)) for length in range(0, FILE, 11)},
    "a byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "absurdly long": lambda path: os.truncate(path, 1 << 40),
    "zeros": lambda path: path.write_bytes(bytes(FILE)),
    "a pickle": lambda path: path.write_bytes(pickle.dumps([0] * 100)[:FILE].ljust(FILE, b".")),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link": lambda path: (path.rename(path.parent.parent / "x"), path.symlink_to(path.parent.parent / "x")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("restart", [False, True])
def test_damage_is_a_miss_and_is_quarantined(folder: Path, damage: Callable[[Path], None], restart: bool) -> None:
    tier = opened(folder, files=10_000)  # so that quarantine has room for a folder's own bytes
    for number in range(3):
        tier.write(name(number), payload(number), 1.0)
    damage(Path(tier._path(_address(1))))
    if restart:
        tier = opened(folder, files=10_000)
    assert read(tier, name(1)) is None
    assert tier.counts()["disk_quarantined"] == 1
    assert not tier.holds(name(1))
    assert [read(tier, name(number)) for number in (0, 2)] == [payload(0), payload(2)]
    # What is larger than the quarantine may become is deleted.
    assert len(list(folder.glob("*/quarantine/*"))) == (damage is not DAMAGE["absurdly long"])
    assert balanced(tier)
    assert tier.write(name(1), payload(1), 1.0) is Written.STORED
    assert read(tier, name(1)) == payload(1)
    assert balanced(opened(folder))


def test_a_write_replaces_a_damaged_file(folder: Path) -> None:
    tier = opened(folder)
    tier.write(name(1), payload(1), 1.0)
    flip(Path(tier._path(_address(1))), FILE - 1)
    assert tier.write(name(1), payload(1), 1.0) is Written.STORED
    assert read(tier, name(1)) == payload(1)
    assert tier.counts()["disk_quarantined"] == 1


def test_a_file_under_the_name_of_another_block(folder: Path) -> None:
    tier = opened(folder)
    tier.write(name(1), payload(1), 1.0)
    Path(tier._path(_address(2))).write_bytes(Path(tier._path(_address(1))).read_bytes())
    assert read(tier, name(2)) is None
    assert read(tier, name(1)) == payload(1)
    assert tier.counts()["disk_quarantined"] == 1


def test_the_quarantine_is_bounded(folder: Path) -> None:
    tier = opened(folder, files=16)
    for number in range(16):
        tier.write(name(number), payload(number), 1.0)
    for number in range(16):
        flip(Path(tier._path(_address(number))), FILE - 1)
        assert read(tier, name(number)) is None
    assert tier.counts()["disk_quarantined"] == 16
    assert tier.book().quarantined == 2 * FILE
    assert balanced(tier)


def test_a_quarantine_that_others_filled_is_bounded_too(folder: Path) -> None:
    """Processes that find damage and end, one after the other; and a budget that is lower than theirs was."""
    for _ in range(10):
        tier = opened(folder, files=16)
        for number in range(2):
            assert tier.write(name(number), payload(number), 1.0) is Written.STORED
            os.truncate(tier._path(_address(number)), FILE - number)
            flip(Path(tier._path(_address(number))), 1)
    tier = opened(folder, files=16)
    assert tier.book().quarantined <= 2 * FILE
    assert balanced(tier)
    tier = opened(folder, files=8)
    assert tier.book().quarantined <= FILE
    assert tier.write(name(3), payload(3), 1.0) is Written.STORED
    assert balanced(tier)


def test_a_folder_in_the_place_of_a_block_does_not_fill_the_quarantine(folder: Path) -> None:
    tier = opened(folder, files=16)
    for number in range(4):
        os.mkdir(tier._path(_address(number)))
        assert read(tier, name(number)) is None
    assert tier.book().quarantined == 0
    assert balanced(tier)


def test_a_quarantine_that_fails_leaves_a_miss(folder: Path) -> None:
    tier = opened(folder)
    tier.write(name(1), payload(1), 1.0)
    flip(Path(tier._path(_address(1))), FILE - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", _fails)
        assert read(tier, name(1)) is None
    assert tier.counts()["io_errors"] == 1
    assert balanced(tier)
    assert read(tier, name(1)) is None
    assert balanced(tier)


def _fails(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_foreign_files_stay_and_are_counted(folder: Path) -> None:
    tier = opened(folder)
    tier.write(name(1), payload(1), 1.0)
    blocks = Path(tier._path(_address(1))).parent
    for foreign in ("notes.txt", "0" * 64, "0" * 63 + "g.block", ".block"):
        (blocks / foreign).write_bytes(b"?")
    again = opened(folder)
    assert again.counts()["disk_foreign"] == 4
    assert again.book().live == FILE
    assert len(block_files(folder)) == 5
    assert again.recount() == []


def test_what_other_processes_do_is_seen(folder: Path) -> None:
    one, two = opened(folder), opened(folder)
    one.write(name(1), payload(1), 1.0)
    assert not two.holds(name(1))
    assert read(two, name(1)) == payload(1)  # found without having been told of
    assert two.holds(name(1))
    assert two.write(name(1), payload(1), 1.0) is Written.PRESENT
    Path(one._path(_address(1))).unlink()
    assert read(two, name(1)) is None
    assert two.counts()["disk_vanished"] == 1
    one.refresh()
    assert not one.holds(name(1))
    assert balanced(one)
    assert balanced(two)


def test_a_full_folder_is_looked_at_again(folder: Path) -> None:
    """Two processes on one budget overrun it by what they write between two looks, at most."""
    one, two = opened(folder, files=40), opened(folder, files=40)
    for number in range(200):
        (one, two)[number % 2].write(name(number), payload(number), 1.0)
    assert len(block_files(folder)) <= 40 + 2 * 16
    one.refresh()
    one.write(name(999), payload(999), 1.0)
    assert one.book().free >= 0


def test_errors_of_a_scan_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(folder).write(name(1), payload(1), 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", _fails)
        tier = opened(folder)
    assert tier.counts()["io_errors"] == 1
    assert read(tier, name(1)) == payload(1)


def test_an_eviction_that_fails_refuses_the_write(folder: Path) -> None:
    tier = opened(folder, files=1)
    tier.write(name(1), payload(1), 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", _fails)
        assert tier.write(name(2), payload(2), 1.0) is Written.REFUSED
    assert read(tier, name(1)) == payload(1)
    assert balanced(tier)


def test_the_disk_tier_needs_no_torch() -> None:
    code = "import sys, redknot.latents.disk; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
