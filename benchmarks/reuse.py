"""TTFT of recompute against reuse on the same token ids: `request` and `forward`, per length and profile.

    python -m benchmarks.reuse --model models/nano --tokens 1024 2048 4096 8192 --profile rowsparse --profile turbo

Documents of 512 tokens from nano's generator, built once a profile into a temporary store. Three warm-up pairs, then
pairs in alternating order; the ratio is the median of paired ratios with a bootstrap interval. Cold is the first
request of a fresh engine whose store files were dropped from the page cache (where the file system does that), against
the median of recompute. Break-even is how often a document must be used until building it has paid for itself. A
request of the reuse arm that ran dense ends the benchmark.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks._pagecache import drop_from_cache
from eval.statistics import Interval, ratio
from redknot.cli.main import main as redknot
from redknot.nano.corpus import questions, write_corpus
from redknot.runtime.engine import Engine
from redknot.runtime.report import Report


def built(corpus: Path, model: Path, store: Path, profile: str) -> float:
    """Build the corpus for one profile; seconds a token."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        redknot(["build", str(corpus), "--model", str(model), "--store", str(store), "--profile", profile, "--json"])
    result = json.loads(out.getvalue())
    return float(result["seconds"] / result["built_tokens"])


def reusing(engine: Engine, segments: list[str]) -> Report:
    """One request of the reuse arm, which must have reused."""
    report = engine.generate(segments=segments, max_new_tokens=1).report
    if report.arm != "reuse":
        raise SystemExit(f"the reuse arm ran dense: {report.reason} ({report.detail})")
    return report


def measure(engine: Engine, segments: list[str], pairs: int) -> dict[str, Any]:
    """The pairs of one length."""
    times: dict[str, list[tuple[float, float]]] = {"reuse": [], "recompute": []}
    for number in range(3 + pairs):
        for arm in ("reuse", "recompute") if number % 2 else ("recompute", "reuse"):
            if arm == "reuse":
                report = found = reusing(engine, segments)
            else:
                report = engine.generate(segments=segments, reuse="off", max_new_tokens=1).report
            if number >= 3:
                times[arm].append((report.ttft_request_s, report.ttft_forward_s))
    reuse, recompute = np.array(times["reuse"]), np.array(times["recompute"])
    request, forward = (ratio(recompute[:, side], reuse[:, side]) for side in (0, 1))
    allowed = 1 / (1 - found.ledgers.arithmetic.share)
    assert found.bounds is not None  # of every report that reused
    return {
        "profile": engine.profile.name,
        "tokens": found.prompt_tokens,
        "reused": found.reused_tokens,
        "ratio_request": asdict(request),
        "ratio_forward": forward.value,
        "flops_allow": allowed,
        "of_allowed": request.value / allowed,
        "row_bound": found.bounds.row_bound,
        "ttft_ms": {
            arm: {"median": 1000 * float(np.median(of)), "p95": 1000 * float(np.quantile(of, 0.95))}
            for arm, of in (("reuse", reuse[:, 0]), ("recompute", recompute[:, 0]))
        },
        "wall": dict(found.ledgers.wall_clock),
    }


def cold_ms(args: argparse.Namespace, store: Path, profile: str, segments: list[str], repeats: int = 3) -> float:
    """Median `request` TTFT of first requests."""
    found = []
    for _ in range(repeats):
        engine = Engine(args.model, store, profile)
        engine.generate(
            token_ids=[1, 2, 3], reuse="off", max_new_tokens=1
        )  # what torch sets up once is not the store's
        drop_from_cache(store)
        found.append(reusing(engine, segments).ttft_request_s)
    return 1000 * statistics.median(found)


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
        texts = [path.read_text(encoding="utf-8") for path in sorted(corpus.glob("*.txt"))]
        for profile in profiles:
            seconds = built(corpus, args.model, store / profile, profile)
            engine = Engine(args.model, store / profile, profile)
            for tokens in args.tokens:
                documents = [texts[i] for i in rng.permutation(len(texts))[: tokens // 512]]
                segments = [*documents, questions(documents[0])[0][0]]
                row = measure(engine, segments, args.pairs)
                medians = {arm: times["median"] for arm, times in row["ttft_ms"].items()}
                cold = cold_ms(args, store / profile, profile, segments)
                row["cold"] = {"ttft_ms": cold, "ratio_request": medians["recompute"] / cold}
                saved = medians["recompute"] - medians["reuse"]
                row["break_even_uses"] = 1000 * seconds * tokens / saved if saved > 0 else None
                rows.append(row)
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    names = (
        "profile",
        "tokens",
        "reused",
        "request, interval",
        "forward",
        "cold",
        "FLOPs allow",
        "of it",
        "row bound",
    )
    print("{:<12} {:>6} {:>6} {:>23} {:>8} {:>6} {:>12} {:>6} {:>10}".format(*names), end="")
    print("  TTFT ms, median and p95: reuse, recompute   break-even uses")
    for row in rows:
        request = f"{Interval(**row['ratio_request']):.2f}"
        uses = "never" if row["break_even_uses"] is None else f"{row['break_even_uses']:.2f}"
        ttft = "  ".join(f"{of['median']:>8.1f} {of['p95']:>8.1f}" for of in row["ttft_ms"].values())
        print(
            f"{row['profile']:<12} {row['tokens']:>6} {row['reused']:>6} {request:>23} "
            f"{row['ratio_forward']:>8.2f} {row['cold']['ratio_request']:>6.2f} "
            f"{row['flops_allow']:>12.2f} {row['of_allowed']:>6.0%} {row['row_bound']:>9.1f}x  {ttft}  {uses:>10}"
        )


if __name__ == "__main__":
    main()
