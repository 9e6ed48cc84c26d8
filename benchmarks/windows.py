"""Window rows on disk: what each strategy takes, and how long a document takes to restore, against recomputing it.

    OMP_NUM_THREADS=2 python -m benchmarks.windows --tokens 512 4096 4095

One document alone; one of the lengths ends a token in front of a checkpoint. *warm* is the first use in a process:
certificate, sections read and verified from files that are in the page cache, blocks filled, windows in place. *cold*
is the same after the files were dropped from the page cache (where the file system does that). *hot* is a later use:
sections, blocks and recomputed windows are in memory. All in turns with recomputing the document; ratios are medians of
paired ratios with a bootstrap interval. Break-even is how many first uses pay for building the artifact (evaluating and
publishing it, as a build does, one document).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._pagecache import drop_from_cache
from benchmarks._paired import in_turns
from eval.statistics import Interval, ratio
from redknot.artifact.certificate import CertificateDraft
from redknot.artifact.identity import ModelIdentity
from redknot.artifact.publish import Publication
from redknot.artifact.sections import section_specs
from redknot.artifact.store import ArtifactStore
from redknot.build.capture import evaluate
from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace
from redknot.model.checkpoint import load_model
from redknot.model.profile import SHIPPED
from redknot.plan.rows import KnownRun
from redknot.runtime.counters import Counters
from redknot.runtime.identity import model_identity
from redknot.runtime.library import Library
from redknot.runtime.model import Model
from redknot.runtime.prefill import dense_session, prefill
from redknot.runtime.restore import Source, restored_session
from redknot.runtime.windows import rebuild_windows

NAMESPACE = "bench"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
KEPT = {
    "all rows": ("window_all", "window_tail"),
    "all, turbo": ("window_tail",),
    "checkpoints:1": ("window_checkpoints:1",),
    "checkpoints:4": ("window_checkpoints:4",),
    "checkpoints:16": ("window_checkpoints:16",),
    "none": ("window_none",),
}


@dataclass(frozen=True)
class Bench:
    """One document and everything around it."""

    model: Model
    identity: ModelIdentity
    folder: Path
    ids: torch.Tensor
    clock: Callable[[], float]

    def recompute(self) -> float:
        """Seconds of the document's own prefill."""
        with LatentSpace(self.model.geometry) as space:
            started = self.clock()
            with Workspace(space) as memory:
                session = dense_session(memory, len(self.ids), len(self.ids), closed=True)
                prefill(self.model, [session], [self.ids], Counters())
            return self.clock() - started


class Artifact:
    """The document's artifact of one strategy, in a store of its own."""

    def __init__(self, bench: Bench, name: str) -> None:
        """Build it."""
        self.bench, self.needs = bench, tuple(sorted(("latents", *KEPT[name])))
        self.path, started = bench.folder / f"{name}-{len(bench.ids)}", bench.clock()
        made = evaluate(bench.model, [bench.ids], self.needs, Counters())[0]
        draft = CertificateDraft(NAMESPACE, bench.identity, self.needs)
        with ArtifactStore(self.path, create=True) as store:
            item = Publication(draft, made, bench.ids.numpy().astype(np.int32), ("d",))
            self.certificate = store.publish_many([item])[0]
        self.build_seconds = self.bench.clock() - started
        self.kept = (ArtifactStore(self.path), LatentSpace(bench.model.geometry))  # of the uses that are hot
        self.ran = self.restore(*self.kept)[1]

    @property
    def payload(self) -> int:
        """Bytes of all sections."""
        specs = section_specs(self.bench.model.geometry, len(self.bench.ids), self.needs).values()
        return sum(4 * math.prod(shape) for _, shape in specs)

    def first_use(self, *, cold: bool) -> float:
        """Seconds to restore it with nothing in memory."""
        if cold:
            drop_from_cache(self.path)
        with ArtifactStore(self.path) as store, LatentSpace(self.bench.model.geometry) as space:
            return self.restore(store, space)[0]

    def later_use(self) -> float:
        """Seconds to restore it again."""
        return self.restore(*self.kept)[0]

    def restore(self, store: ArtifactStore, space: LatentSpace) -> tuple[float, Counters]:
        """What a request does between its plan and its prefill; matching, and room for its own rows, not included."""
        model, tokens, counters = self.bench.model, len(self.bench.ids), Counters()
        needs = SHIPPED["turbo"].needs()
        library = Library(store, self.bench.identity, model.geometry, (NAMESPACE,), needs, model.group.shard)
        library.refresh()
        run = KnownRun(self.certificate.artifact_id, 0, 0, tokens, tokens)
        started = self.bench.clock()
        artifact, _ = library.certified(run.artifact_id, [tokens])
        source = Source(run, artifact, bytes.fromhex(artifact.certificate.digest), library.rebuild(run))
        with Workspace(space, NAMESPACE) as memory:
            session = restored_session(memory, [source], tokens, 0)
            rebuild_windows(model, memory, session, [source], counters)
        return self.bench.clock() - started, counters

    def close(self) -> None:
        """End what was kept for hot uses."""
        for kept in self.kept:
            kept.close()


def measure(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    """All strategies on one document."""
    artifacts = {name: Artifact(bench, name) for name in KEPT}
    sides: dict[str, Callable[[], float]] = {"recompute": bench.recompute}
    for name, artifact in artifacts.items():
        sides |= {
            f"{name} warm": lambda made=artifact: made.first_use(cold=False),
            f"{name} cold": lambda made=artifact: made.first_use(cold=True),
            f"{name} hot": artifact.later_use,
        }
    for side in sides.values():
        side()
    seconds = in_turns(sides, rounds)
    rows = [row(name, artifact, seconds) for name, artifact in artifacts.items()]
    for artifact in artifacts.values():
        artifact.close()
    return rows


def row(name: str, artifact: Artifact, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """One line of the table."""
    tokens, recompute = len(artifact.bench.ids), seconds["recompute"]
    sides = {side: seconds[f"{name} {side}"] for side in ("warm", "cold", "hot")}
    saved = statistics.median(recompute) - statistics.median(sides["warm"])
    return {
        "tokens": tokens,
        "windows": name,
        "payload_bytes": artifact.payload,
        "disk_bytes": artifact.certificate.nbytes,
        "bytes_per_token": artifact.certificate.nbytes / tokens,
        "window_rows_run": artifact.ran.window_rows,
        "window_row_layers": artifact.ran.window_row_layers,
        "recompute_ms": 1000 * statistics.median(recompute),
        "build_ms": 1000 * artifact.build_seconds,
        "ms": {side: 1000 * statistics.median(of) for side, of in sides.items()},
        "faster": {side: asdict(ratio(recompute, of)) for side, of in sides.items()},
        "break_even_uses": artifact.build_seconds / saved if saved > 0 else None,
    }


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The table for people."""
    out = [
        "| tokens | windows | payload B | on disk B | rows run | recompute ms | cold ms | warm ms | hot ms "
        "| recompute / warm | recompute / cold | break-even uses |",
        "|" + "---|" * 12,
    ]
    for r in rows:
        warm, uses = r["faster"]["warm"], r["break_even_uses"]
        out.append(
            f"| {r['tokens']:,} | {r['windows']} | {r['payload_bytes']:,} | {r['disk_bytes']:,} "
            f"| {r['window_rows_run']} | {r['recompute_ms']:.0f} "
            f"| {r['ms']['cold']:.1f} | {r['ms']['warm']:.1f} | {r['ms']['hot']:.1f} "
            f"| {Interval(**warm):.1f} "
            f"| {r['faster']['cold']['value']:.1f}x | {'never' if uses is None else f'{uses:.1f}'} |"
        )
    return out


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/nano"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096, 4095])
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds, after one to warm up")
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure (default: the system's)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of this process, where others are busy")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model, rows = Model(*load_model(options.model)), []
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        identity = model_identity(options.model, model.geometry, torch.float32, Path(folder))
        for tokens in options.tokens:
            ids = torch.from_numpy(np.random.default_rng(tokens).integers(8, model.geometry.vocab_size, tokens))
            rows += measure(Bench(model, identity, Path(folder), ids, CLOCKS[options.clock]), options.rounds)
    if options.json:
        print(json.dumps({"threads": torch.get_num_threads(), "clock": options.clock, "rows": rows}, indent=2))
        return
    print(f"{options.model.name}, {torch.get_num_threads()} threads, {options.rounds} rounds, {options.clock} time")
    print(*lines(rows), sep="\n")


if __name__ == "__main__":
    main()
