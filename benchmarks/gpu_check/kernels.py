"""Every kernel against its float32 reference and against its floor; one that fails does not stop the others."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.cases import ALLOWED, Chooser, Inputs, make_case
from benchmarks.gpu_check.clock import Budget, median_seconds, synchronise
from benchmarks.gpu_check.floors import Sizes, floors
from redknot.model.geometry import Geometry
from redknot.ops.dispatch import Op, choose

ESTIMATE_S = 15.0  # of one kernel, compilation included


def worst(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest finite magnitude; inf where shapes, infinities or NaN differ."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.float(), expected.float()
    same = (found == expected) | (found.isnan() & expected.isnan())
    if bool(same.all()):
        return 0.0
    finite = expected.isfinite()
    if not bool((same | (finite & found.isfinite())).all()):
        return float("inf")
    scale = expected[finite].abs().max().clamp_min(1e-30)
    return float(((found - expected)[finite].abs().max()) / scale)


def check_kernels(
    g: Geometry,
    sizes: Sizes,
    device: torch.device,
    rates: tuple[float, float],
    budget: Budget,
    chooser: Chooser = choose,
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Results of the kernels that ran, and what was skipped and why; ``rates`` are bytes and FLOPs a second."""
    results, skipped = [], []
    works = floors(g, sizes)
    for op in Op:
        if lack := budget.lacks(ESTIMATE_S if device.type == "cuda" else 1.0):
            skipped.append({"what": f"kernel {op}", "why": lack})
            continue
        print(f"kernel {op}", file=sys.stderr, flush=True)
        work = works[op]
        row: dict[str, Any] = {"kernel": str(op), "rows": sizes.rows, "bytes": work.nbytes, "flops": work.flops}
        try:
            row |= _measured(op, Inputs(g, sizes, device), device, chooser)
        except Exception as error:  # noqa: BLE001  # a kernel fails in ways of its compiler, its driver and ours
            row |= {"ok": False, "failure": f"{type(error).__name__}: {error}"[:2000]}
        floor = work.seconds(*rates)
        row["floor_seconds"] = floor
        if row.get("seconds"):
            row["times_floor"] = row["seconds"] / floor
        results.append(row)
    return results, skipped


def _measured(op: Op, inputs: Inputs, device: torch.device, chooser: Chooser) -> dict[str, Any]:
    case = make_case(op, inputs, chooser)
    started = time.perf_counter()
    found = [part.clone() for part in case.found()]  # before the reference: its memory must not be what is judged
    synchronise(device)
    once = time.perf_counter() - started
    expected = case.expected()
    if len(found) != len(expected):
        raise ValueError(f"{len(found)} results, the reference has {len(expected)}")
    error = max(worst(one, other) for one, other in zip(found, expected, strict=True))
    del expected
    # In the interpreter time says nothing, and a second run would only take it.
    seconds = median_seconds(case.kernel, device) if device.type == "cuda" else once
    return {"error": error, "allowed": ALLOWED[op], "ok": error <= ALLOWED[op], "seconds": seconds}
