"""What an open group at a document's end should become: a partial entry, or nothing (docs/decisions/0002).

    python -m benchmarks.seams --n 100

Every row runs, groups are counted per document, and the answers and first-token distributions are compared with those
of native recomputation, once with the partial entries visible and once with them hidden.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from redknot.latents.segment import Segment
from redknot.model.checkpoint import load_model
from redknot.nano.evaluate import Answer, answer_dense, answer_grouped, divergence
from redknot.nano.samples import make_sample, sample_ids
from redknot.nano.shares import wilson
from redknot.runtime.model import Model


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
