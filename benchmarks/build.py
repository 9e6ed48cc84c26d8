"""Throughput of a build, tokenise to published, against prefilling the same batches in the same run; bytes a token.

OMP_NUM_THREADS=2 python -m benchmarks.build --documents 64 --tokens 2048
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from redknot.artifact.header import DTYPES
from redknot.artifact.sections import section_specs
from redknot.artifact.store import ArtifactStore
from redknot.build.builder import BATCH_TOKENS, batches, build
from redknot.build.contents import Content, tokenise
from redknot.build.documents import CorpusReport, Document
from redknot.build.plan import plan_build
from redknot.build.target import Target, make_target
from redknot.errors import ConfigError
from redknot.latents.sizing import sized_for
from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace
from redknot.model.checkpoint import load_model
from redknot.model.profile import SHIPPED
from redknot.model.tokenizer import Tokenizer, load_tokenizer
from redknot.nano.parameters import initial_tensors, save_checkpoint
from redknot.nano.statements import lexicon
from redknot.nano.text import document_ids
from redknot.nano.tokenizer import build_tokenizer, save
from redknot.nano.worlds import draw_facts
from redknot.runtime.counters import Counters
from redknot.runtime.identity import model_identity
from redknot.runtime.model import Model
from redknot.runtime.prefill import dense_session, prefill

TARGET_RATIO = 0.85


@dataclass(frozen=True)
class Seconds:
    """One timed call: on the clock, and of this process on all cores."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Bench:
    """What every profile is measured with."""

    checkpoint: Path
    model: Model
    tokenizer: Tokenizer
    documents: list[Document]
    scratch: Path

    def contents(self) -> list[Content]:
        """The documents as ids."""
        report = CorpusReport()
        found = tokenise(self.documents, self.tokenizer, self.model.geometry.max_positions, report)
        assert not report.problems, report.problems
        return found.all

    def prefill_all(self, contents: list[Content]) -> None:
        """The forwards of a build and nothing else."""
        geometry = self.model.geometry
        for batch in batches(contents, BATCH_TOKENS):
            ids = [torch.from_numpy(content.token_ids).long() for content in batch]
            lengths = [len(one) for one in ids]
            with LatentSpace(geometry, sized_for(geometry, lengths)) as space, Workspace(space) as memory:
                sessions = [dense_session(memory, length, length, closed=True) for length in lengths]
                prefill(self.model, sessions, ids, Counters(), chunk=BATCH_TOKENS)

    def build_all(self, target: Target) -> None:
        """A whole build into a new store."""
        store_path = self.scratch / "store"
        draft = target.draft(
            model_identity(self.checkpoint, self.model.geometry, torch.float32, self.scratch / "cache")
        )
        plan = plan_build(target, store_path, self.contents(), None)
        plan.check_space()
        with ArtifactStore(store_path, create=True) as store:
            build(self.model, store, draft, plan.missing, heads=target.heads)

    def clear(self) -> int:
        """Remove the store; returns the bytes its artifacts took."""
        with ArtifactStore(self.scratch / "store") as store:
            nbytes = store.bytes_on_disk().objects
        shutil.rmtree(self.scratch / "store")
        return nbytes


def timed(call: Callable[[], object]) -> Seconds:
    """Run once."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def measure(bench: Bench, name: str, pairs: int) -> dict[str, object]:
    """One profile: alternating pairs, after one that is not counted."""
    try:
        target = make_target(bench.model.geometry, [SHIPPED[name]], 1, "bench")
    except ConfigError as error:
        return {"profile": name, "note": str(error)}
    contents = bench.contents()
    found: dict[str, list[Seconds]] = {"build": [], "prefill": []}
    nbytes = 0
    for pair in range(pairs + 1):
        for arm in ("build", "prefill") if pair % 2 else ("prefill", "build"):
            seconds = timed(
                (lambda: bench.build_all(target)) if arm == "build" else (lambda: bench.prefill_all(contents))
            )
            if arm == "build":
                nbytes = bench.clear()
            if pair:
                found[arm].append(seconds)
    tokens = sum(map(len, contents))
    payload = sum(_spec_bytes(target, len(content)) for content in contents)
    median = {arm: statistics.median(one.wall for one in times) for arm, times in found.items()}
    both = list(zip(found["prefill"], found["build"], strict=True))
    return {
        "profile": name,
        "prefill_tokens_per_s": tokens / median["prefill"],
        "build_tokens_per_s": tokens / median["build"],
        "ratio": statistics.median(prefilled.wall / built.wall for prefilled, built in both),
        "cpu_ratio": statistics.median(prefilled.cpu / built.cpu for prefilled, built in both),
        "bytes_per_token": nbytes / tokens,
        "planned_bytes_per_token": sum(target.nbytes(len(content)) for content in contents) / tokens,
        "payload_bytes_per_token": payload / tokens,
        "pairs": [{"prefill": asdict(prefilled), "build": asdict(built)} for prefilled, built in both],
    }


def _spec_bytes(target: Target, tokens: int) -> int:
    """The arithmetic: bytes of every section, no headers, no certificate."""
    specs = section_specs(target.geometry, tokens, target.needs, target.world).values()
    return sum(int(np.prod(shape)) * DTYPES[dtype].itemsize for dtype, shape in specs)


def checkpoint_in(scratch: Path, given: Path | None) -> Path:
    """The checkpoint given, or nano with random weights: the work is the same."""
    if given is not None:
        return given
    save_checkpoint(initial_tensors(torch.Generator().manual_seed(0)), scratch / "nano")
    save(scratch / "nano")
    return scratch / "nano"


def make_documents(count: int, tokens: int, seed: int) -> list[Document]:
    """nano documents of exactly ``tokens`` tokens."""
    rng, lex = np.random.default_rng(seed), lexicon(build_tokenizer())
    made = []
    for number in range(count):
        facts = draw_facts(rng, "train", max(1, tokens // 64))
        text = lex.text(document_ids(rng, lex, tokens, facts))
        made.append(Document(f"d{number}", text, f"d{number}"))
    return made


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="checkpoint (default: nano with random weights)")
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a document")
    parser.add_argument("--pairs", type=int, default=5, help="measured pairs a profile, after one warm-up pair")
    parser.add_argument("--profiles", nargs="*", default=list(SHIPPED))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure (default: the system's)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        scratch = Path(folder)
        checkpoint = checkpoint_in(scratch, options.model)
        model = Model(*load_model(checkpoint))
        documents = make_documents(options.documents, options.tokens, options.seed)
        bench = Bench(checkpoint, model, load_tokenizer(checkpoint, model.geometry), documents, scratch)
        rows = [measure(bench, name, options.pairs) for name in options.profiles]
    sizes = {"documents": options.documents, "tokens": options.tokens, "threads": torch.get_num_threads()}
    if options.json:
        print(json.dumps({**sizes, "target_ratio": TARGET_RATIO, "profiles": rows}, indent=2))
        return
    print(", ".join(f"{value} {name}" for name, value in (*sizes.items(), ("pairs", options.pairs))))
    print(f"{'profile':<12}{'prefill tok/s':>14}{'build tok/s':>12}{'ratio':>7}{'cpu':>6}{'B/token':>9}", end="")
    print(f"{'planned':>9}{'payload':>9}")
    for row in rows:
        if "note" in row:
            print(f"{row['profile']:<12}{row['note']}")
            continue
        print(
            f"{row['profile']:<12}{row['prefill_tokens_per_s']:>14.0f}{row['build_tokens_per_s']:>12.0f}"
            f"{row['ratio']:>7.3f}{row['cpu_ratio']:>6.2f}{row['bytes_per_token']:>9.1f}"
            f"{row['planned_bytes_per_token']:>9.1f}{row['payload_bytes_per_token']:>9.1f}"
        )


if __name__ == "__main__":
    main()
