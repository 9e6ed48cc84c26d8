"""Recompute prefill against transformers' DeepSeek-V4 on one checkpoint, and its rate against plain matrix products.

    python benchmarks/prefill.py --model models/nano --tokens 512 2048 [--json]

Both run the same token ids in the same process, in alternating order, after one warm-up each; ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DeepseekV4ForCausalLM

from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace
from redknot.model.checkpoint import load_model
from redknot.runtime.counters import Counters
from redknot.runtime.model import Model
from redknot.runtime.prefill import dense_session, prefill


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def product_rate(rounds: int) -> float:
    """Best of a large and of an attention-shaped float32 product, FLOP/s (the median over rounds of each)."""
    rates = []
    for m, k, n in ((2048, 2048, 2048), (2048, 128, 256)):
        a, b = torch.randn(m, k), torch.randn(n, k)
        torch.nn.functional.linear(a, b)
        seconds = [timed(lambda a=a, b=b: torch.nn.functional.linear(a, b)) for _ in range(rounds)]
        rates.append(2 * m * k * n / statistics.median(seconds))
    return max(rates)


def measure(model: Model, peer: DeepseekV4ForCausalLM, tokens: int, rounds: int, rate: float) -> dict[str, float]:
    ids = torch.randint(259, model.geometry.vocab_size, (tokens,), generator=torch.Generator().manual_seed(tokens))
    counters, space = Counters(), LatentSpace(model.geometry)

    def ours() -> None:
        with Workspace(space) as memory:
            prefill(model, [dense_session(memory, tokens, tokens)], [ids], counters)

    @torch.inference_mode()
    def theirs() -> None:
        peer(ids.unsqueeze(0), use_cache=True, logits_to_keep=1)

    ours()
    theirs()
    counters.flops = 0
    ours()
    flops = counters.flops
    mine, other = [], []
    for number in range(rounds):
        for run, times in ((ours, mine), (theirs, other)) if number % 2 else ((theirs, other), (ours, mine)):
            times.append(timed(run))
    seconds, peer_seconds = statistics.median(mine), statistics.median(other)
    return {
        "tokens": tokens,
        "redknot_s": seconds,
        "transformers_s": peer_seconds,
        "ratio": peer_seconds / seconds,
        "gflop": flops / 1e9,
        "gflop_per_s": flops / seconds / 1e9,
        "share_of_product_rate": flops / seconds / rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/nano"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model = Model(*load_model(args.model))
    peer = DeepseekV4ForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    rate = product_rate(15)
    rows = [measure(model, peer, tokens, args.rounds, rate) for tokens in args.tokens]
    if args.json:
        print(
            json.dumps({"product_gflop_per_s": rate / 1e9, "threads": torch.get_num_threads(), "rows": rows}, indent=2)
        )
        return
    print(f"matrix products: {rate / 1e9:.0f} GFLOP/s on {torch.get_num_threads()} threads")
    print(f"{'tokens':>7} {'redknot s':>10} {'transformers s':>15} {'ratio':>7} {'GFLOP/s':>8} {'of products':>12}")
    for row in rows:
        print(
            f"{row['tokens']:>7} {row['redknot_s']:>10.3f} {row['transformers_s']:>15.3f} {row['ratio']:>7.1f} "
            f"{row['gflop_per_s']:>8.1f} {row['share_of_product_rate']:>12.1%}"
        )


if __name__ == "__main__":
    main()
