"""The check of the GPU path: floors by hand, its budget and arguments, a wrong kernel, and a whole run at toy size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is in the dev extra on Linux")

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check.check import layers_that_fit
from benchmarks.gpu_check.clock import Budget
from benchmarks.gpu_check.endtoend import ARMS
from benchmarks.gpu_check.floors import Sizes, Work, floors, record_bytes, table
from benchmarks.gpu_check.kernels import check_kernels, worst
from benchmarks.gpu_check.model import flash, toy, weight_bytes
from redknot.model.geometry import geometry_from_config
from redknot.model.profile import load_profile
from redknot.model.published import published_config
from redknot.ops.dispatch import Choice, Op, choose
from redknot.ops.records import V4_INDEX_FP8, V4_RECORD

ROOT = Path(__file__).resolve().parents[2]
FLASH = geometry_from_config(published_config("flash"))
CPU = torch.device("cpu")
# Only these and the standard library may be imported, by the check and by what it imports. The others that are let
# through are torch's own.
ALONE = """
import sys
ALLOWED = {"torch", "triton", "numpy", "redknot", "benchmarks", "functorch", "torchgen", "sympy", "mpmath", "networkx",
           "jinja2", "markupsafe", "filelock", "fsspec", "typing_extensions", "setuptools", "_distutils_hack"}
class Alone:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        own = top in sys.stdlib_module_names or top.startswith("_sysconfigdata")  # named after the platform
        if top not in ALLOWED and not own:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Alone())
from benchmarks.gpu_check.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_floors_by_hand() -> None:
    """One row of Flash: 64 heads of 512, a window of 128 and 512 entries; 16 KB in eight groups of 1024."""
    found = floors(FLASH, Sizes(1, entries=1000, parts=3))
    out = 64 * 513 * 4
    assert found[Op.SEGMENT_ATTENTION] == Work(64 * 512 * 2 + 640 * 8 + 640 * 584 + out, 4 * 640 * 64 * 512)
    assert found[Op.MERGE] == Work(4 * out + 64 * 4, 2 * 3 * 64 * 512)
    assert found[Op.PROJECTION] == Work(65536 + 8 * 4096 * 1024 * 2 + 2 * 8192 * 4 + 8, 2 * 32768 * 1024)
    assert found[Op.SCORES] == Work(64 * (256 + 4) + 8 + 1000 * 140 + 4000, 2 * 1000 * 64 * 129)
    assert found[Op.EXPERTS] == Work(2 * 8192 + 7 * 3 * 4096 * 2048 * 2 + 6 * 12, 6 * 7 * 4096 * 2048)
    assert found[Op.PACK] == found[Op.UNPACK] == Work(2048 + 584 + 8, 0)
    assert (record_bytes(V4_RECORD), record_bytes(V4_INDEX_FP8)) == (584, 132)


def test_a_record_is_read_once_however_many_rows_want_it() -> None:
    few, many = (floors(FLASH, Sizes(rows, entries=1000))[Op.SEGMENT_ATTENTION] for rows in (2, 4))
    assert many.nbytes - few.nbytes == 2 * (64 * 512 * 2 + 640 * 8 + 64 * 513 * 4)


def test_the_longer_time_is_the_floor() -> None:
    assert Work(100, 10).seconds(10.0, 10.0) == 10.0
    assert Work(10, 100).seconds(10.0, 5.0) == 20.0


def test_the_documentation_has_these_floors() -> None:
    assert table([1, 1024]) in (ROOT / "docs/gpu.md").read_text(encoding="utf-8")


def test_arms_are_the_profiles_of_flash() -> None:
    for arm in ARMS:
        profile = load_profile(str(ROOT / f"configs/profiles/{arm.name}.json"))
        for field in fields(arm):
            value = getattr(arm, field.name)
            if field.name == "protected":
                assert vars(value) == profile.protected.model_dump()
            else:
                assert value == getattr(profile, field.name), field.name
        assert arm.row_needs() == profile.needs()


def test_a_budget_names_what_is_lacking() -> None:
    now = 100.0
    budget = Budget(10.0, lambda: now)
    assert budget.lacks(9.0) == ""
    now = 107.0
    assert budget.spent == 7.0
    assert budget.lacks(3.0) == "3 s of the budget are left, it takes about 3 s"
    now = 200.0
    assert budget.lacks(0.0).startswith("0 s")


def test_no_time_skips_every_kernel_by_name() -> None:
    results, skipped = check_kernels(toy(), Sizes(2, 40), CPU, (1.0, 1.0), Budget(1e-9))
    assert results == []
    assert [one["what"] for one in skipped] == [f"kernel {op}" for op in Op]
    assert all("budget" in one["why"] for one in skipped)


def test_fewer_layers_on_a_smaller_device() -> None:
    g, dtype = flash(), torch.bfloat16
    assert layers_that_fit(g, 65536, dtype, 139 << 30) == 43
    some = layers_that_fit(g, 65536, dtype, 48 << 30)
    assert 8 <= some < 43
    assert layers_that_fit(g, 65536, dtype, 8 << 30) == 0
    assert weight_bytes(g, torch.float32) == 2 * weight_bytes(g, dtype)


def test_differences() -> None:
    nan, inf = float("nan"), float("inf")
    one = torch.tensor([1.0, -2.0, nan, -inf])
    assert worst(one, one.clone()) == 0.0
    assert worst(torch.tensor([1.0, -1.0, nan, -inf]), one) == 0.5
    assert worst(torch.tensor([1.0, nan, nan, -inf]), one) == inf
    assert worst(torch.tensor([1.0, -2.0, nan, inf]), one) == inf
    assert worst(one[:3], one) == inf


def wrong(op_that_is: Op, how: str) -> Any:
    """A chooser of references, of which one is wrong or fails."""

    def chooser(op: Op, features: Any, device: torch.device, mode: Any) -> Choice:
        right = choose(op, features, device).function

        def function(*arguments: Any) -> Any:
            if op is not op_that_is:
                return right(*arguments)
            if how == "fails":
                raise RuntimeError("no such instruction")
            found = right(*arguments)
            return replace(found, output=found.output * 1.1)

        return Choice(function, True, "")

    return chooser


@pytest.mark.parametrize("how", ["wrong", "fails"])
def test_a_bad_kernel_is_found_and_stops_no_other(how: str) -> None:
    results, skipped = check_kernels(toy(), Sizes(3, 40, 3), CPU, (1.0, 1.0), Budget(1e9), wrong(Op.MERGE, how))
    assert skipped == []
    assert [row["kernel"] for row in results] == list(Op)
    assert [row["kernel"] for row in results if not row["ok"]] == [Op.MERGE]
    bad = next(row for row in results if not row["ok"])
    assert ("no such instruction" in bad["failure"]) if how == "fails" else bad["error"] > bad["allowed"]


def test_a_wrong_kernel_makes_the_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.gpu_check import check

    monkeypatch.setattr(check, "_end_to_end", lambda *arguments: ([], [], []))
    run = check.run_check
    monkeypatch.setattr(check, "run_check", lambda device, budget: run(device, budget, wrong(Op.MERGE, "wrong")))
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "1"))
    assert command.main(["--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "FAILED: merge_segments" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device", "tpu"],
        ["--budget", "0"],
        ["--budget", "nan"],
        ["--budget", "inf"],
        ["--budget", "soon"],
        ["--device", "cpu", "--out", "."],
        ["--device", "cpu", "--out", "no/such/folder/x.json"],
        ["--what"],
        ["extra"],
        pytest.param([], marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
    ],
)
def test_bad_arguments_make_the_exit_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2


def alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", ALONE, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_a_whole_run_at_toy_size_with_torch_and_triton_alone(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = alone("--device", "cpu", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["ok"]
    assert found["toy"]
    assert (found["skipped"], found["failures"]) == ([], [])
    assert [row["kernel"] for row in found["kernels"]] == list(Op)
    (run,) = found["end_to_end"]
    assert list(run["arms"]) == ["recompute", "rowsparse", "turbo"]
    row_layers = [of["row_layers"] for of in run["arms"].values()]
    assert row_layers == sorted(row_layers, reverse=True)
    assert found["provenance"]["torch"] == torch.__version__
    assert "passed" in done.stdout
    assert "kernel merge_segments" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]


def test_a_budget_that_is_spent_is_said_and_is_no_failure(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    script = ROOT / "scripts/gpu_check.sh"
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [script, "--device", "cpu", "--budget", "0.001", "--out", out],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["kernels"] == found["end_to_end"] == []
    assert len(found["skipped"]) == len(Op) + 1
    assert done.stdout.count("skipped: ") == len(Op) + 1
