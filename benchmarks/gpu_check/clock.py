"""Time on a device, the rates that floors are taken against, and the time that is left."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

WARM_UPS, ROUNDS = 2, 7


class Budget:
    """Seconds until the check must end; a part begins only when its share is left."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self.seconds, self._started = now, seconds, now()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self._now() - self._started

    def lacks(self, seconds: float) -> str:
        """Why a part that takes about so long cannot begin; empty when it can."""
        left = self.seconds - self.spent
        return "" if left > seconds else f"{max(left, 0):.0f} s of the budget are left, it takes about {seconds:.0f} s"


def synchronise(device: torch.device) -> None:
    """Wait for a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(
    run: Callable[[], object], device: torch.device, rounds: int = ROUNDS, warm_ups: int = WARM_UPS
) -> float:
    """The median of ``rounds`` runs behind the warm-ups: CUDA events on a GPU, perf_counter on a CPU."""
    for _ in range(warm_ups):
        run()
    synchronise(device)
    return statistics.median(_once(run, device) for _ in range(rounds))


def _once(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1000


def copy_rate(device: torch.device, nbytes: int) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(1)
    into = torch.empty_like(source)
    return 2 * nbytes / median_seconds(lambda: into.copy_(source), device)


def product_rate(device: torch.device, side: int, dtype: torch.dtype) -> float:
    """FLOPs a second of a square matrix product of random numbers."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / median_seconds(lambda: a @ b, device)
