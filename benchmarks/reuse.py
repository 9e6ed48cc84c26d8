"""TTFT of recompute against reuse on the same token ids: `request` and `forward`, per length and profile.

    python benchmarks/reuse.py --model models/nano --tokens 1024 2048 4096 8192 --profile rowsparse --profile turbo

Documents of 512 tokens from nano's generator, built once into a temporary store. Three warm-up pairs, then pairs in
alternating order; the ratio is the median of paired ratios with a bootstrap interval. A request of the reuse arm that
ran dense ends the benchmark.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from redknot.cli.main import main as redknot
from redknot.nano.corpus import questions, write_corpus
from redknot.runtime.engine import Engine


def interval(values: list[float], rng: np.random.Generator) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    draws = rng.choice(np.asarray(values), size=(2000, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return float(low), float(high)


def measure(engine: Engine, segments: list[str], pairs: int, rng: np.random.Generator) -> dict[str, Any]:
    ratios: dict[str, list[float]] = {"request": [], "forward": []}
    times: list[float] = []
    reports = {}
    for number in range(3 + pairs):
        for mode in ("auto", "off") if number % 2 else ("off", "auto"):
            reports[mode] = engine.generate(segments=segments, reuse=mode, max_new_tokens=1).report
        if reports["auto"].arm != "reuse":
            raise SystemExit(f"the reuse arm ran dense: {reports['auto'].reason} ({reports['auto'].detail})")
        if number < 3:
            continue
        times.append(reports["auto"].ttft_request_s)
        ratios["request"].append(reports["off"].ttft_request_s / reports["auto"].ttft_request_s)
        ratios["forward"].append(reports["off"].ttft_forward_s / reports["auto"].ttft_forward_s)
    report = reports["auto"]
    allowed = 1 / (1 - report.ledgers.arithmetic.share)
    return {
        "profile": engine.profile.name,
        "tokens": report.prompt_tokens,
        "reused": report.reused_tokens,
        "ratio_request": statistics.median(ratios["request"]),
        "interval": interval(ratios["request"], rng),
        "ratio_forward": statistics.median(ratios["forward"]),
        "flops_allow": allowed,
        "of_allowed": statistics.median(ratios["request"]) / allowed,
        "ttft_ms": 1000 * statistics.median(times),
        "wall": dict(report.ledgers.wall_clock),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/nano"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--profile", action="append", help="default: rowsparse and turbo")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    profiles = args.profile or ["rowsparse", "turbo"]
    rng = np.random.default_rng(0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        corpus, store = Path(folder) / "corpus", Path(folder) / "store"
        tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
        write_corpus(corpus, tokenizer, max(args.tokens) // 512, 512, 6, 11)
        words = [word for profile in profiles for word in ("--profile", profile)]
        redknot(["build", str(corpus), "--model", str(args.model), "--store", str(store), *words])
        texts = [path.read_text(encoding="utf-8") for path in sorted(corpus.glob("*.txt"))]
        for profile in profiles:
            engine = Engine(args.model, store, profile)
            for tokens in args.tokens:
                documents = [texts[i] for i in rng.permutation(len(texts))[: tokens // 512]]
                question = questions(documents[0])[0][0]
                rows.append(measure(engine, [*documents, question], args.pairs, rng))
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    names = ("profile", "tokens", "reused", "request", "interval", "forward", "FLOPs allow", "of it")
    print("{:<12} {:>6} {:>6} {:>8} {:>14} {:>8} {:>12} {:>6}".format(*names))
    for row in rows:
        low, high = row["interval"]
        print(
            f"{row['profile']:<12} {row['tokens']:>6} {row['reused']:>6} {row['ratio_request']:>8.2f} "
            f"[{low:>5.2f}, {high:>5.2f}] {row['ratio_forward']:>8.2f} {row['flops_allow']:>12.2f} "
            f"{row['of_allowed']:>6.0%}"
        )


if __name__ == "__main__":
    main()
