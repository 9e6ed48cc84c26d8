"""Find results files and read their records, whole runs in the order in which they started."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from eval.results import RESULTS, Record, Run, read_results
from redknot.errors import InputError

NAMES = (RESULTS, f"{RESULTS}.gz")


def results_files(paths: Sequence[Path]) -> list[Path]:
    """The given files, and the results files at and below the given folders; InputError where there are none."""
    found: dict[Path, Path] = {}  # by resolved path: two ways to one file are one file
    for path in paths:
        if path.is_file():
            inside = [path]
        elif path.is_dir():
            inside = sorted(inner for name in NAMES for inner in path.rglob(name) if inner.is_file())
        else:
            raise InputError(f"{path}: no such file or folder")
        if not inside:
            raise InputError(f"{path} holds no {' or '.join(NAMES)}; `python -m eval.nanoqa --out {path}` writes one")
        for inner in inside:
            found.setdefault(inner.resolve(), inner)
    return list(found.values())


def read_runs(files: Iterable[Path]) -> list[tuple[Run, list[Record]]]:
    """Each run with its records in the order of their lines, the run that started first in front.

    InputError for a record whose run no file holds, and for two runs of one name.
    """
    runs: dict[str, Run] = {}
    records: dict[str, list[Record]] = {}
    for path in files:
        for record in read_results(path):
            if isinstance(record, Run):
                if runs.setdefault(record.run, record) != record:
                    raise InputError(f"{path}: a second, different run is called {record.run!r}")
            else:
                records.setdefault(record.run, []).append(record)
    if unknown := sorted(set(records) - set(runs)):
        raise InputError(f"records name the run {unknown[0]!r}, which none of the files describes")
    order = sorted(runs.values(), key=lambda run: (run.started, run.run))
    return [(run, records.get(run.run, [])) for run in order]
