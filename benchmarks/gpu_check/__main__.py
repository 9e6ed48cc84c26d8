"""Check the GPU path on this machine: every kernel against float32 and its floor, and a whole model end to end.

    python -m benchmarks.gpu_check --device cuda --out gpu.json
    python -m benchmarks.gpu_check --device cpu     # at toy size, kernels in Triton's interpreter

Needs torch and triton, nothing else. The table goes to stdout, progress to stderr. Exit status: 0 passed, 1 a kernel
or a run is wrong or failed, 2 bad arguments or no such device.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=520.0, metavar="SECONDS", help="when it must end (520)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the JSON goes")
    args = parser.parse_args(arguments)
    if not (math.isfinite(args.budget) and args.budget > 0):
        parser.error("--budget is a number of seconds above 0")
    if args.out is not None and (args.out.is_dir() or not args.out.parent.is_dir()):
        parser.error(f"--out {args.out}: not a file in a folder that is there")
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        parser.error(f"{error.name} is not installed; the check needs torch and triton")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no CUDA device; --device cpu runs at toy size")

    from benchmarks.gpu_check.check import run_check
    from benchmarks.gpu_check.clock import Budget
    from benchmarks.gpu_check.report import table, write_json

    device = torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")
    result = run_check(device, Budget(args.budget))
    if args.out is not None:
        write_json(args.out, result)
    print(table(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
