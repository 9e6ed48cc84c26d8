"""The parts in order, as large as the device and the budget allow; what is left out is named."""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks.gpu_check.cases import Chooser
from benchmarks.gpu_check.clock import Budget, copy_rate, product_rate
from benchmarks.gpu_check.endtoend import ROUNDS, compare, latent_bytes, tiny_run
from benchmarks.gpu_check.floors import Sizes
from benchmarks.gpu_check.kernels import check_kernels
from benchmarks.gpu_check.model import TOY_LAYERS, fewer_layers, flash, random_model, runnable_dtype, toy, weight_bytes
from benchmarks.gpu_check.provenance import provenance
from redknot.model.geometry import Geometry
from redknot.ops.dispatch import choose

FORMAT, VERSION = "redknot-gpu-check", 1
TOKENS = (16384, 65536)
TOY_TOKENS = (512,)
TOY_NOTE = "everything has toy size, and kernels took the time of Triton's interpreter: floors say nothing here"
SHARE = 0.8  # of free memory that weights and latents may take
ACTIVATIONS = 8 << 30  # of a chunk of rows, kept free beside them
ROOMY = 24 << 30  # below it kernels run on fewer rows
MODEL_S, LENGTH_S = 45.0, 60.0  # what making a model and one length are taken to cost on a GPU


def run_check(device: torch.device, budget: Budget, chooser: Chooser = choose) -> dict[str, Any]:
    """Everything; JSON values."""
    on_cpu, free = device.type == "cpu", _free(device)
    smaller = [TOY_NOTE] if on_cpu else _smaller_kernels(free)
    sizes = Sizes(2, 70, 3) if on_cpu else Sizes(256 if smaller else 1024)
    print("rates", file=sys.stderr, flush=True)
    rates = (
        copy_rate(device, 1 << 22 if on_cpu else 1 << 30),
        product_rate(device, 256 if on_cpu else 8192, torch.bfloat16),
    )
    g = toy() if on_cpu else flash()
    kernels, skipped = check_kernels(g, sizes, device, rates, budget, chooser)
    if not on_cpu:
        torch.cuda.empty_cache()
    runs, notes, more = _end_to_end(g, device, budget, free)
    skipped += more
    bad = [row["kernel"] for row in kernels if not row["ok"]]
    bad += [str(run["tokens"]) for run in runs if "failure" in run or not _finite(run)]
    return {
        "format": FORMAT,
        "version": VERSION,
        "provenance": provenance(device),
        "toy": on_cpu,
        "rates": {"copy_bytes_per_s": rates[0], "flops_per_s": rates[1]},
        "kernels": kernels,
        "end_to_end": [run for run in runs if "failure" not in run],
        "failures": [run for run in runs if "failure" in run],
        "peak_bytes": None if on_cpu else torch.cuda.max_memory_allocated(device),
        "smaller": smaller + notes,
        "skipped": skipped,
        "verdict": f"FAILED: {', '.join(bad)}" if bad else "passed",
        "ok": not bad,
        "seconds": budget.spent,
    }


def _finite(run: dict[str, Any]) -> bool:
    return all(found["finite"] for found in run["arms"].values())


def _free(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def _smaller_kernels(free: int) -> list[str]:
    if free >= ROOMY:
        return []
    return [f"kernels run on 256 rows, not 1,024: {free >> 30} GiB are free, {ROOMY >> 30} are wanted"]


def layers_that_fit(g: Geometry, tokens: int, dtype: torch.dtype, free: int) -> int:
    """How many of a model's layers fit beside the latents of a prompt; 0 below what three fences need."""
    for layers in range(g.num_layers, TOY_LAYERS - 1, -1):
        less = fewer_layers(g, layers)
        if weight_bytes(less, dtype) + latent_bytes(less, tokens) + ACTIVATIONS <= SHARE * free:
            return layers
    return 0


def _end_to_end(
    g: Geometry, device: torch.device, budget: Budget, free: int
) -> tuple[list[dict[str, Any]], list[str], list[dict[str, str]]]:
    """Results of each length, notes on what was made smaller, and what was skipped."""
    on_cpu = device.type == "cpu"
    lengths = TOY_TOKENS if on_cpu else TOKENS
    if lack := budget.lacks(5.0 if on_cpu else MODEL_S + LENGTH_S):
        return [], [], [{"what": f"end to end at {tokens} tokens", "why": lack} for tokens in lengths]
    print("model", file=sys.stderr, flush=True)
    dtype, why = (torch.float32, "") if on_cpu else runnable_dtype(device, tiny_run)
    notes = [f"end to end in float32, not bf16: {why}"] if why else []
    runs: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    model = None
    for tokens in reversed(lengths):  # the longest says how many layers fit
        layers = g.num_layers if on_cpu else layers_that_fit(g, tokens, dtype, free)
        if not layers:
            skipped.append({"what": f"end to end at {tokens} tokens", "why": f"{free >> 30} GiB are free"})
            continue
        if layers < g.num_layers:
            notes.append(f"end to end on {layers} layers, not {g.num_layers}: {free >> 30} GiB are free")
        g = fewer_layers(g, layers)
        break
    else:
        return [], notes, skipped
    for number, tokens in enumerate(lengths):
        if any(one["what"].endswith(f"at {tokens} tokens") for one in skipped):
            continue
        lack = budget.lacks(5.0 if on_cpu else LENGTH_S * (1 + number))
        if lack:
            skipped.append({"what": f"end to end at {tokens} tokens", "why": lack})
            continue
        about = {"tokens": tokens, "layers": g.num_layers, "dtype": str(dtype).removeprefix("torch.")}
        try:
            model = model or random_model(g, device, dtype)
            found = compare(model, tokens, device, budget.lacks, 1 if on_cpu else ROUNDS)
            skipped += found.pop("skipped")
            runs.append(about | found)
        except Exception as error:  # noqa: BLE001  # one length that fails is reported beside the others
            runs.append(about | {"failure": f"{type(error).__name__}: {error}"[:2000]})
    return runs, notes, skipped
