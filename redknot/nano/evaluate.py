"""Measure nano: ``python -m redknot.nano.evaluate`` answers fresh test samples in every arm and counts exact answers.

An arm is a profile (``recompute`` included), run in memory without a store, or ``no-documents``: the question alone.
All arms see the same token ids. The interval is Wilson's, 95 %.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from redknot.build.capture import evaluate
from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace
from redknot.model.checkpoint import load_model
from redknot.model.profile import Profile, load_profile
from redknot.nano.text import make_sample, sample_ids
from redknot.plan.rows import KnownRun
from redknot.runtime.counters import Counters
from redknot.runtime.model import Model
from redknot.runtime.prefill import dense_session, greedy, prefill
from redknot.runtime.reuse import Source, choose_rows, prefill_reusing, restored_session, segmented_session

NO_DOCUMENTS = "no-documents"


@dataclass(frozen=True)
class InMemory:
    """An artifact's sections, kept in a dictionary."""

    sections: dict[str, Tensor]

    def section(self, name: str) -> Tensor:
        """One section."""
        return self.sections[name]


def answer_dense(model: Model, token_ids: Tensor, length: int) -> list[int]:
    """Greedy answer of ``length`` tokens by full recomputation."""
    with LatentSpace(model.geometry) as space, Workspace(space) as memory:
        session = dense_session(memory, len(token_ids), len(token_ids) + length)
        logits = prefill(model, [session], [token_ids], Counters())[0]
        return greedy(model, session, int(logits.argmax()), length)


def answer_reusing(
    model: Model, segments: Sequence[Tensor], artifacts: Sequence[InMemory], profile: Profile, length: int
) -> list[int]:
    """Greedy answer with the documents read from artifacts; ``segments`` are [BOS], documents..., question."""
    token_ids, runs, at = torch.cat(list(segments)), [], len(segments[0])
    for number, document in enumerate(segments[1:-1]):
        runs.append(KnownRun(str(number), at, 0, len(document), len(document)))
        at += len(document)
    sources = [Source(run, artifact) for run, artifact in zip(runs, artifacts, strict=True)]
    with LatentSpace(model.geometry) as space, Workspace(space) as memory:
        if profile.reuses_rows:
            session = restored_session(memory, sources, len(token_ids), length)
        else:
            session = segmented_session(memory, runs, len(token_ids), length)
        counters = Counters()
        rows = choose_rows(model, session, runs, token_ids, profile, counters)
        logits = prefill_reusing(model, session, sources, rows, token_ids, profile, counters)
        return greedy(model, session, int(logits.argmax()), length)


def wilson(right: int, n: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927)."""
    z, share = 1.959964, right / n
    centre, spread = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)


def run(model: Model, tokenizer: Tokenizer, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every task and arm over the same samples."""
    profiles = {name: load_profile(name) for name in args.arms if name != NO_DOCUMENTS}
    needs = tuple(sorted({need for profile in profiles.values() for need in profile.needs()} - {"window_tail"}))
    if any("window_tail" in profile.needs() for profile in profiles.values()):
        needs = tuple(sorted({*needs, "window_all"}))  # the whole window serves profiles that read the tail only
    rows = []
    for task in args.tasks:
        rng = np.random.default_rng([args.seed, sum(task.encode())])
        right = dict.fromkeys(args.arms, 0)
        for _ in tqdm(range(args.n), desc=task, disable=not sys.stderr.isatty()):
            tokens = int(rng.integers(args.tokens[0], args.tokens[1] + 1))
            documents = int(rng.integers(args.documents[0], args.documents[1] + 1))
            sample = make_sample(rng, tokenizer, task, "test", tokens, documents)
            *segments, answer = [torch.tensor(ids) for ids in sample_ids(tokenizer, sample)]
            artifacts = [InMemory(s) for s in evaluate(model, segments[1:-1], needs, Counters())] if needs else []
            for arm in args.arms:
                if arm == NO_DOCUMENTS:
                    found = answer_dense(model, torch.cat([segments[0], segments[-1]]), len(answer))
                elif profiles[arm].reuses:
                    found = answer_reusing(model, segments, artifacts, profiles[arm], len(answer))
                else:
                    found = answer_dense(model, torch.cat(segments), len(answer))
                right[arm] += found == answer.tolist()
        for arm in args.arms:
            low, high = wilson(right[arm], args.n)
            row = {"task": task, "arm": arm, "n": args.n, "right": right[arm], "accuracy": right[arm] / args.n}
            rows.append({**row, "low": low, "high": high, "tokens": args.tokens, "documents": args.documents})
            print(
                f"{task:<8} {arm:<24} {right[arm]:>4}/{args.n}  {right[arm] / args.n:.3f} [{low:.3f}, {high:.3f}]",
                flush=True,
            )
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/nano"))
    parser.add_argument("--tasks", nargs="+", default=["single", "latest"])
    parser.add_argument("--arms", nargs="+", default=["recompute", NO_DOCUMENTS], help="profile names or files")
    parser.add_argument("--n", type=int, default=500, help="samples a task")
    parser.add_argument("--tokens", type=int, nargs=2, default=[1024, 2048], help="prompt length, lowest and highest")
    parser.add_argument("--documents", type=int, nargs=2, default=[4, 8], help="documents, fewest and most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="append one JSON line a row")
    args = parser.parse_args()
    geometry, weights = load_model(args.model)
    rows = run(Model(geometry, weights), Tokenizer.from_file(str(args.model / "tokenizer.json")), args)
    if args.out:
        with args.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({**row, "seed": args.seed}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
