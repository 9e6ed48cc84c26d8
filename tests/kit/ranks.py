"""Running a function on real ranks: processes joined by gloo, with a hard limit, none left behind.

Run as ``python -m tests.kit.ranks RANK WORLD FOLDER module:function``; :func:`run_ranks` starts the processes.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]

SHARDED = (
    *(f"attn.{field}" for field in ("wq_b", "sinks", "wo_a", "wo_b")),
    *(f"moe.{field}" for field in ("w13", "w2", "shared_w13", "shared_w2")),
)
"""Endings of the paths whose tensors are divided among tensor-parallel ranks; all others are replicated."""


def run_ranks(world: int, function: str, folder: Path, limit: float = 150) -> list[Any]:
    """What ``function`` ("module:name", called with the group and the folder) returned on each rank.

    The ranks' answers are tensors and plain values that ``torch.load`` reads without unpickling code. Raises with
    what the failing ranks wrote; after ``limit`` seconds all ranks are killed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes, logs = [], []
    try:
        for rank in range(world):
            log = (folder / f"rank{rank}.log").open("w+", encoding="utf-8")
            logs.append(log)
            command = [sys.executable, "-m", "tests.kit.ranks", str(rank), str(world), str(folder), function]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        deadline = time.monotonic() + limit
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        states = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    failed = [
        f"rank {rank} ended with {state}:\n{(folder / f'rank{rank}.log').read_text(encoding='utf-8')[-3000:]}"
        for rank, state in enumerate(states)
        if state
    ]
    if failed:  # all of them: a rank whose peer died fails too, and may come first
        raise AssertionError("\n".join(failed))
    if None in states:
        raise AssertionError(f"ranks {[r for r, s in enumerate(states) if s is None]} did not end in {limit:.0f} s")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world)]


def _main(rank: int, world: int, folder: Path, function: str) -> None:
    import torch.distributed as dist

    from redknot.comm.group import TorchGroup

    torch.set_num_threads(1)
    module, name = function.split(":")
    target = getattr(importlib.import_module(module), name)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    answer = target(TorchGroup(), folder)
    torch.save(answer, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
