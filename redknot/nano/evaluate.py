"""Measure nano: ``python -m redknot.nano.evaluate`` answers fresh test samples in every arm and counts exact answers.

An arm is a profile (``recompute`` included), run in memory without a store, ``no-documents``: the question alone, or
``segment-grouped``: every row run, its groups counted from the start of each document and not of the request. All arms
see the same token ids. The interval is Wilson's, 95 %. KL is of the first answer token's distribution, recompute's
against the arm's, the mean over the samples in nats.
"""

from __future__ import annotations

import argparse
import json
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

from redknot.build.inmemory import InMemory, in_memory, restored_request
from redknot.build.target import Target, make_target
from redknot.latents.session import Session
from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace
from redknot.model.checkpoint import load_model
from redknot.model.profile import Profile, load_profile
from redknot.nano.samples import make_sample, sample_ids
from redknot.nano.shares import wilson
from redknot.nano.worlds import TASKS
from redknot.plan.rows import KnownRun
from redknot.runtime.counters import Counters
from redknot.runtime.model import Model
from redknot.runtime.prefill import dense_session, greedy, prefill
from redknot.runtime.restore import Source, segmented_session
from redknot.runtime.reuse import prefill_reusing

NO_DOCUMENTS = "no-documents"
SEGMENT_GROUPED = "segment-grouped"
RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and the logits [vocab] of the first one."""

    tokens: list[int]
    logits: Tensor


def answer_dense(model: Model, token_ids: Tensor, length: int) -> Answer:
    """``length`` tokens by full recomputation."""
    with LatentSpace(model.geometry) as space, Workspace(space) as memory:
        session = dense_session(memory, len(token_ids), len(token_ids) + length)
        return _continue(model, session, prefill(model, [session], [token_ids], Counters())[0], length)


def answer_grouped(model: Model, segments: Sequence[Tensor], length: int) -> Answer:
    """``length`` tokens with every row run and groups counted per segment."""
    token_ids = torch.cat(list(segments))
    with LatentSpace(model.geometry) as space, Workspace(space) as memory:
        session = segmented_session(memory, _runs(segments), len(token_ids), length)
        return _continue(model, session, prefill(model, [session], [token_ids], Counters())[0], length)


def answer_reusing(
    model: Model, segments: Sequence[Tensor], artifacts: Sequence[InMemory], profile: Profile, length: int
) -> Answer:
    """``length`` tokens with the documents read from artifacts."""
    token_ids, runs = torch.cat(list(segments)), _runs(segments)
    sources = [Source(run, artifact) for run, artifact in zip(runs, artifacts, strict=True)]
    with LatentSpace(model.geometry) as space, Workspace(space) as memory:
        session, rows = restored_request(model, memory, sources, token_ids, profile, length)
        logits = prefill_reusing(model, session, sources, rows, token_ids, profile, Counters())
        return _continue(model, session, logits, length)


def _runs(segments: Sequence[Tensor]) -> list[KnownRun]:
    """The documents of [BOS], documents..., question."""
    runs, at = [], len(segments[0])
    for number, document in enumerate(segments[1:-1]):
        runs.append(KnownRun(str(number), at, 0, len(document), len(document)))
        at += len(document)
    return runs


def _continue(model: Model, session: Session, logits: Tensor, length: int) -> Answer:
    return Answer(greedy(model, session, int(logits.argmax()), length), logits)


def divergence(reference: Tensor, other: Tensor) -> float:
    """KL(reference || other) of two logits [vocab], in nats."""
    p, q = reference.double().log_softmax(0), other.double().log_softmax(0)
    return float((p.exp() * (p - q)).sum())


@dataclass
class Tally:
    """What an arm did over the samples of a task."""

    right: int = 0
    same_first: int = 0  # first tokens that recompute picks too
    divergence: float = 0.0


def answers(
    model: Model, segments: Sequence[Tensor], arms: dict[str, Profile | None], target: Target | None, length: int
) -> dict[str, Answer]:
    """Every arm's answer to one sample: [BOS], documents..., question."""
    artifacts = in_memory(model, target, segments[1:-1]) if target is not None else []
    found = {}
    for arm, profile in arms.items():
        if arm == NO_DOCUMENTS:
            found[arm] = answer_dense(model, torch.cat([segments[0], segments[-1]]), length)
        elif arm == SEGMENT_GROUPED:
            found[arm] = answer_grouped(model, segments, length)
        elif profile is not None and profile.reuses:
            found[arm] = answer_reusing(model, segments, artifacts, profile, length)
        else:
            found[arm] = answer_dense(model, torch.cat(list(segments)), length)
    return found


def run(model: Model, tokenizer: Tokenizer, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every task and arm over the same samples."""
    arms = {name: None if name in (NO_DOCUMENTS, SEGMENT_GROUPED) else load_profile(name) for name in args.arms}
    reusing = [profile for profile in arms.values() if profile is not None and profile.reuses]
    target = make_target(model.geometry, reusing, 1, "default") if reusing else None
    rows = []
    for task in args.tasks:
        rng = np.random.default_rng([args.seed, sum(task.encode())])
        tallies = {arm: Tally() for arm in arms}
        for _ in tqdm(range(args.n), desc=task, disable=not sys.stderr.isatty()):
            tokens = int(rng.integers(args.tokens[0], args.tokens[1] + 1))
            documents = int(rng.integers(args.documents[0], args.documents[1] + 1))
            sample = make_sample(rng, tokenizer, task, "test", tokens, documents)
            *segments, answer = [torch.tensor(ids) for ids in sample_ids(tokenizer, sample)]
            found = answers(model, segments, arms, target, len(answer))
            for arm, tally in tallies.items():
                tally.right += found[arm].tokens == answer.tolist()
                if RECOMPUTE in found:
                    tally.same_first += found[arm].tokens[0] == found[RECOMPUTE].tokens[0]
                    tally.divergence += divergence(found[RECOMPUTE].logits, found[arm].logits)
        for arm, tally in tallies.items():
            rows.append(_row(args, task, arm, tally))
            print(_line(rows[-1]), flush=True)
    return rows


def _row(args: argparse.Namespace, task: str, arm: str, tally: Tally) -> dict[str, Any]:
    low, high = wilson(tally.right, args.n)
    row = {"task": task, "arm": arm, "n": args.n, "right": tally.right, "accuracy": tally.right / args.n}
    row |= {"low": low, "high": high, "tokens": args.tokens, "documents": args.documents}
    if RECOMPUTE in args.arms:
        row |= {"top1_agreement": tally.same_first / args.n, "kl": tally.divergence / args.n}
    return row


def _line(row: dict[str, Any]) -> str:
    text = f"{row['task']:<8} {row['arm']:<24} {row['right']:>4}/{row['n']}  "
    text += f"{row['accuracy']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
    return text + (f"  KL {row['kl']:.4f}  top-1 {row['top1_agreement']:.3f}" if "kl" in row else "")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/nano"))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
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
