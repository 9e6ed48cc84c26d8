"""The payload and disk comparisons."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._paired import in_turns, timed
from eval.statistics import ratio
from redknot.latents.content import caller_name, content_hash
from redknot.latents.disk import DiskTier, Written
from redknot.latents.handles import Handle, Run
from redknot.latents.pool import Pool, host_bytes, same_bytes
from redknot.latents.settings import StoreConfig
from redknot.latents.store import LatentStore

NAMESPACE = "payload"
CPU = torch.device("cpu")


def _contents(blocks: int, nbytes: int) -> Tensor:
    return torch.randint(0, 256, (blocks, nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def measure_payload(nbytes: int, budget: int, rounds: int) -> dict[str, Any]:
    """Sealing ``budget`` bytes in blocks; each round has contents of its own."""
    blocks = max(4, budget // nbytes)
    source, copied = Pool(blocks, nbytes, CPU), Pool(blocks, nbytes, CPU)
    source.data.copy_(_contents(blocks, nbytes))
    copied.data.zero_()
    store = LatentStore(StoreConfig(b"payload", nbytes, 2 * blocks * nbytes))
    stamps = source.data[:, :8].view(torch.int64)
    shared: list[Run] = []

    def filled() -> list[Handle]:
        handles = store.handles(store.allocate(NAMESPACE, blocks))
        for handle, row in zip(handles, source.data, strict=True):
            store.fill(handle).copy_(row)
        return handles

    def seal() -> float:
        handles = filled()
        seconds = timed(lambda: [store.seal(handle) for handle in handles])
        shared.append(handles[0].run)
        return seconds

    def fresh() -> float:
        stamps.add_(1)  # other contents than any before
        while shared:
            store.free(shared.pop())
        return seal()

    def copy() -> float:
        return timed(lambda: [into.copy_(row) for into, row in zip(copied.data, source.data, strict=True)])

    def hashed() -> float:
        return timed(lambda: [content_hash(source.bytes_of(slot)) for slot in range(blocks)])

    def compared() -> float:
        copied.data.copy_(source.data)
        return timed(lambda: [same_bytes(source, slot, copied, slot) for slot in range(blocks)])

    def sealed() -> tuple[float, float]:
        return fresh(), seal()

    with store:
        copy(), sealed(), compared()
        both: list[tuple[float, float]] = []

        def pair() -> float:
            both.append(sealed())
            return both[-1][0]

        seconds = in_turns({"seal, fresh": pair, "copy": copy, "hash": hashed, "compare": compared}, rounds)
        seconds["seal, equal"] = [second for _, second in both]
        counted, wrong = store.counters(), store.recount()
    if wrong or counted["shares"] != blocks * (rounds + 1) or counted["dedup_collisions"]:
        raise SystemExit(f"the store did not do what was timed: {counted} {wrong}")
    order = ("copy", "seal, fresh", "seal, equal", "hash", "compare")
    return {
        "block_bytes": nbytes,
        "blocks": blocks,
        "gb_per_s": {name: blocks * nbytes / statistics.median(seconds[name]) / 1e9 for name in order},
        "ratios": {name: asdict(ratio(seconds["copy"], seconds[name])) for name in order[1:]},
    }


def measure_disk(folder: Path, nbytes: int, budget: int, rounds: int) -> dict[str, Any]:
    """Writing, then reading warm, then reading cold, on the store's tier and on plain files in turns."""
    blocks = min(64, max(4, budget // nbytes))
    rows = [host_bytes(row) for row in _contents(blocks, nbytes)]
    names = [caller_name(NAMESPACE, number.to_bytes(8, "little")) for number in range(blocks)]
    into = memoryview(bytearray(nbytes))
    root = folder / str(nbytes)
    resident: list[float] = []
    seconds: dict[str, dict[str, list[float]]] = {}

    def checked(times: dict[str, float], action: str, run: Callable[[], bool]) -> None:
        right: list[bool] = []
        times[action] = timed(lambda: right.append(run()), time.perf_counter)
        if right != [True]:
            raise SystemExit(f"{action}: a block was not written or not read as it was")

    def tier() -> float:
        disk = DiskTier(root / "tier", b"disk", nbytes, 2 * blocks * (nbytes + 4096))
        times: dict[str, float] = {}
        pairs = list(zip(names, rows, strict=True))
        checked(times, "write", lambda: all(disk.write(name, row, 1.0) is Written.STORED for name, row in pairs))
        checked(times, "read, warm", lambda: all(disk.read(name, into) is not None for name in names))
        resident.append(_drop_from_cache(root / "tier"))
        checked(times, "read, cold", lambda: all(disk.read(name, into) is not None for name in names))
        return keep("store", times)

    def plain() -> float:
        times: dict[str, float] = {}
        (root / "plain").mkdir(parents=True)
        paths = [root / "plain" / str(number) for number in range(blocks)]
        checked(times, "write", lambda: all(_write(path, row) for path, row in zip(paths, rows, strict=True)))
        checked(times, "read, warm", lambda: all(_read(path, into) for path in paths))
        resident.append(_drop_from_cache(root / "plain"))
        checked(times, "read, cold", lambda: all(_read(path, into) for path in paths))
        return keep("plain", times)

    def keep(side: str, times: dict[str, float]) -> float:
        for action, value in times.items():
            seconds.setdefault(action, {}).setdefault(side, []).append(value)
        shutil.rmtree(root / ("tier" if side == "store" else side))
        return 0.0

    in_turns({"tier": tier, "plain": plain}, 1)
    seconds.clear()
    resident.clear()
    in_turns({"tier": tier, "plain": plain}, rounds)
    return {
        "block_bytes": nbytes,
        "blocks": blocks,
        "resident_after_drop": max(resident),
        "gb_per_s": {
            action: {side: blocks * nbytes / statistics.median(times) / 1e9 for side, times in sides.items()}
            for action, sides in seconds.items()
        },
        "ratios": {action: asdict(ratio(sides["plain"], sides["store"])) for action, sides in seconds.items()},
    }


def _write(path: Path, payload: memoryview) -> bool:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        done = os.write(descriptor, payload)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return done == len(payload)


def _read(path: Path, into: memoryview) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [into], 0) == len(into)
    finally:
        os.close(descriptor)


def _drop_from_cache(folder: Path) -> float:
    """Ask the system to forget the pages of every file; the part of them that it kept."""
    found: list[int] = []
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                found += _resident(file.fileno())
    return statistics.fmean(found)


def _resident(descriptor: int) -> bytes:
    """1 for every page of a file that is in the page cache, else 0; reading to find out would start a read-ahead."""
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY) as pages:
        found = ctypes.create_string_buffer(-(-len(pages) // mmap.PAGESIZE))
        first = ctypes.c_char.from_buffer(pages)  # of a private mapping, none of which is touched
        failed = ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(first), ctypes.c_size_t(len(pages)), found)
        del first
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return bytes(page & 1 for page in found.raw)
