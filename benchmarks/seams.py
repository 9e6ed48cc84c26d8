"""What an open group at a document's end should become: a partial entry, or nothing (docs/decisions/0002).

    python -m benchmarks.seams --n 100

Every row runs, groups are counted per document, and the answers and first-token distributions are compared with those
of native recomputation, once with the partial entries visible and once with them hidden.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from eval.logits import divergence
from eval.statistics import wilson
from redknot.latents.segment import Segment
from redknot.latents.session import Session
from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace
from redknot.model.checkpoint import load_model
from redknot.nano.samples import make_sample, sample_ids
from redknot.plan.rows import KnownRun
from redknot.runtime.counters import Counters
from redknot.runtime.model import Model
from redknot.runtime.prefill import dense_session, greedy, prefill
from redknot.runtime.restore import segmented_session


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


def _runs(segments: Sequence[Tensor]) -> list[KnownRun]:
    """The documents of [BOS], documents..., question."""
    runs, at = [], len(segments[0])
    for number, document in enumerate(segments[1:-1]):
        runs.append(KnownRun(str(number), at, 0, len(document), len(document)))
        at += len(document)
    return runs


def _continue(model: Model, session: Session, logits: Tensor, length: int) -> Answer:
    return Answer(greedy(model, session, int(logits.argmax()), length), logits)


def whole_groups(segment: Segment, positions: Tensor, ratio: int) -> Tensor:
    """Entries that each request position sees, without the partial one: [T] int64."""
    return (positions - segment.first + 1).clamp(0, segment.length) // ratio


@contextmanager
def partial_entries(*, visible: bool) -> Iterator[None]:
    """Hide the partial entries of closed segments for a while, or leave them."""
    if visible:
        yield
        return
    with patch.object(Segment, "visible", whole_groups):
        yield


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/nano"))
    parser.add_argument("--n", type=int, default=100, help="samples a task")
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    model = Model(*load_model(args.model))
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    for task in ("single", "latest"):
        rng = np.random.default_rng([args.seed, len(task)])
        right = dict.fromkeys(("native", "partial entries", "hidden"), 0)
        kl = dict.fromkeys(("partial entries", "hidden"), 0.0)
        for _ in range(args.n):
            tokens, documents = int(rng.integers(1024, 2049)), int(rng.integers(4, 9))
            sample = make_sample(rng, tokenizer, task, "test", tokens, documents)
            *segments, answer = [torch.tensor(ids) for ids in sample_ids(tokenizer, sample)]
            found: dict[str, Answer] = {"native": answer_dense(model, torch.cat(segments), len(answer))}
            for arm in kl:
                with partial_entries(visible=arm == "partial entries"):
                    found[arm] = answer_grouped(model, segments, len(answer))
                kl[arm] += divergence(found["native"].logits, found[arm].logits) / args.n
            for arm, given in found.items():
                right[arm] += given.tokens == answer.tolist()
        for arm, count in right.items():
            low, high = wilson(count, args.n)
            text = f"{task:<7} {arm:<16} {count}/{args.n} [{low:.3f}, {high:.3f}]"
            print(text + (f"  KL from native {kl[arm]:.4f}" if arm in kl else ""), flush=True)


if __name__ == "__main__":
    main()
