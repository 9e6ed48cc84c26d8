"""The result as a JSON file that is whole or not there, and as a table."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write aside, sync, rename; OSError where the folder does not take it."""
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def table(result: dict[str, Any]) -> str:
    """All of it for a reader."""
    of, rates = result["provenance"], result["rates"]
    dirty = " with changes" if of["dirty"] else ""
    lines = [
        f"{of['name']} ({of['device']}), torch {of['torch']}, triton {of['triton']}, driver {of['driver']}, "
        f"commit {of['commit']}{dirty}, {of['date']}",
        f"copy {rates['copy_bytes_per_s'] / 1e9:.1f} GB/s, bf16 products {rates['flops_per_s'] / 1e12:.2f} TFLOP/s, "
        "measured here",
        "",
        f"{'kernel':<20} {'rows':>5} {'error':>9} {'allowed':>9} {'ms':>10} {'floor ms':>10} {'x floor':>8}",
    ]
    lines += [_kernel(row) for row in result["kernels"]]
    for run in result["end_to_end"]:
        lines += ["", f"{run['tokens']:,} tokens, {run['documents']} documents, {run['layers']} layers, {run['dtype']}"]
        lines += [_arm(name, found) for name, found in run["arms"].items()]
    if result["peak_bytes"] is not None:
        lines += ["", f"peak memory {result['peak_bytes'] / 2**30:.1f} GiB"]
    lines += [f"smaller: {note}" for note in result["smaller"]]
    lines += [f"skipped: {one['what']}: {one['why']}" for one in result["skipped"]]
    lines += [f"{result['verdict']}, {result['seconds']:.0f} s"]
    return "\n".join(lines)


def _kernel(row: dict[str, Any]) -> str:
    start = f"{row['kernel']:<20} {row['rows']:>5}"
    if "failure" in row:
        return f"{start} FAILED {row['failure'].splitlines()[0]}"
    return (
        f"{start} {row['error']:>9.1e} {row['allowed']:>9.1e} {1e3 * row['seconds']:>10.3f} "
        f"{1e3 * row['floor_seconds']:>10.4f} {row['times_floor']:>8.1f}{'' if row['ok'] else '  WRONG'}"
    )


def _arm(name: str, found: dict[str, Any]) -> str:
    ratio = (
        f"  {found['ratio_request']:.2f}x (FLOPs allow {found['flops_allow']:.2f}x)" if "flops_allow" in found else ""
    )
    return (
        f"  {name:<10} TTFT request {1e3 * found['request_s']:>9.1f} ms, forward {1e3 * found['forward_s']:>9.1f} ms, "
        f"rows {found['rows_running']:,}, row-layers {found['row_layers']:,}{ratio}"
    )
