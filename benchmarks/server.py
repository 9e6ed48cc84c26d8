"""TTFT and throughput of the SGLang server at several sizes: recompute and reuse on the same prompts, at the client.

    .venv-sglang/bin/python -m benchmarks.server --tokens 1024 2048 4096 --tp-size 1 2 --clients 1 4 16

Starts a server for each number of ranks, over documents of 512 tokens from nano's generator. TTFT: three warm-up pairs,
then pairs in turns; no request finds in the prefix cache what another one left. The client's TTFT is the time to the
first token of a stream; the engine's is in the report. Throughput: as many clients as asked for, each sends its next
request when it has the answer before; every prompt is another choice of documents, the answers have a fixed length. A
request of the reuse arm that ran dense ends the benchmark. `python -m eval.serving` measures rounds for a report, and
arrivals that do not wait for answers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks._paired import in_turns
from eval.arms import Arm, find_arms
from eval.artifacts import Builder, targets
from eval.encoded import Encoded
from eval.engines.server import Server
from eval.engines.sglang import check_server, launch
from eval.engines.wire import Request
from eval.engines.wishes import Wishes
from eval.names import RECOMPUTE
from eval.serving.client import closed_loop
from eval.serving.workload import Generated, Pool, read_pool
from eval.statistics import Interval, ratio
from redknot.cli.common import DEFAULT_MODEL
from redknot.errors import RedKnotError
from redknot.model.geometry import load_geometry

DOCUMENT_TOKENS = 512
WARM_UP, ROUNDS = 3, 3


@dataclass
class Measured:
    """A server, and what is asked of it."""

    server: Server
    wishes: Wishes
    checkpoint: str
    pool: Pool
    seed: int

    def prompts(self, tokens: int, count: int) -> list[Encoded]:
        """Prompts of about so many tokens."""
        return self.pool.prompts(count, max(tokens // DOCUMENT_TOKENS, 1), [self.seed, tokens])

    def ttft(self, arm: str, tokens: int, pairs: int) -> dict[str, Any]:
        """Pairs of one length."""
        [prompt] = self.prompts(tokens, 1)
        engine: dict[str, list[float]] = {RECOMPUTE: [], arm: []}
        reused: list[int] = []

        def once(side: str) -> float:
            stream = self.server.ask(self.wishes.request(side, prompt, 1, exact=True))
            reply = self.wishes.counted(side, stream, self.checkpoint)
            engine[side].append(reply.report["ttft_request_s"])
            reused.append(reply.report["reused_tokens"])
            return reply.ttft_request_s

        client = in_turns({side: partial(once, side) for side in engine}, WARM_UP + pairs)
        sides = {"client": client, "engine": engine}
        times = {name: {side: of[WARM_UP:] for side, of in found.items()} for name, found in sides.items()}
        return {"tokens": len(prompt), "reused": max(reused)} | {
            name: {
                "ratio": asdict(ratio(of[RECOMPUTE], of[arm])),
                "ms": {side: 1000 * statistics.median(values) for side, values in of.items()},
            }
            for name, of in times.items()
        }

    def throughput(self, arm: str, prompts: Sequence[Encoded], clients: int, answer: int) -> dict[str, Any]:
        """Requests a second of recompute and an arm over the same prompts, in turns, behind a round that warms up."""
        sides: dict[str, Callable[[], float]] = {
            side: partial(self._rate, side, prompts, clients, answer) for side in (RECOMPUTE, arm)
        }
        rates = {side: found[1:] for side, found in in_turns(sides, 1 + ROUNDS).items()}
        return {
            "clients": clients,
            "requests_per_s": {side: statistics.median(of) for side, of in rates.items()},
            "ratio": asdict(ratio(rates[arm], rates[RECOMPUTE])),
        }

    def _rate(self, side: str, prompts: Sequence[Encoded], clients: int, answer: int) -> float:
        asked: list[Request] = [self.wishes.request(side, prompt, answer, exact=True) for prompt in prompts]
        self.server.flush()
        started = time.perf_counter()
        shots = closed_loop(
            self.server.url,
            asked,
            clients,
            lambda stream: self.wishes.counted(side, stream, self.checkpoint),
            lambda: None,
        )
        seconds = time.perf_counter() - started
        if failed := [shot.error for shot in shots if shot.error]:
            raise SystemExit(f"{len(failed)} requests of {side} failed: {failed[0]}")
        return len(prompts) / seconds


def measure(args: argparse.Namespace, arms: dict[str, Arm], pool: Pool, tp_size: int) -> list[dict[str, Any]]:
    """Every profile on one server."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        wanted = targets(load_geometry(args.model), [arm.profile for arm in arms.values()], tp_size)
        Builder(args.model, store, wanted).build("generated", pool.documents)
        started = time.perf_counter()
        with launch(args.model, store, arms, tp_size) as launched:
            startup, server = time.perf_counter() - started, Server(launched.url)
            checkpoint, _ = check_server(server, args.model, arms, tp_size)
            found = Measured(server, Wishes(arms), checkpoint, pool, args.seed)
            loads = found.prompts(args.load_tokens, args.requests)
            return [
                {
                    "profile": arm,
                    "tp_size": tp_size,
                    "startup_s": startup,
                    "ttft": [found.ttft(arm, tokens, args.pairs) for tokens in args.tokens],
                    "throughput": [found.throughput(arm, loads, clients, args.answer) for clients in args.clients],
                }
                for arm in arms
                if arm != RECOMPUTE
            ]


def show(found: dict[str, Any]) -> None:
    """The tables of one profile."""
    print(f"\nTP{found['tp_size']}, {found['profile']}: healthy after {found['startup_s']:.0f} s")
    print("tokens  reused  client recompute/reuse ms   ratio             engine recompute/reuse ms   ratio")
    for row in found["ttft"]:
        parts = []
        for where in ("client", "engine"):
            dense, reuse = row[where]["ms"].values()
            parts.append(f"{dense:8.1f} / {reuse:8.1f}  {Interval(**row[where]['ratio']):.2f}")
        print(f"{row['tokens']:6}  {row['reused']:6}  {'  '.join(parts)}")
    for row in found["throughput"]:
        dense, reuse = row["requests_per_s"].values()
        print(
            f"{row['clients']:3} clients: {dense:.2f} requests/s dense, {reuse:.2f} with reuse, "
            f"ratio {Interval(**row['ratio']):.2f}"
        )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--profile", nargs="+", default=["rowsparse", "turbo"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--tp-size", type=int, nargs="+", default=[1])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=32, help="of each round of the throughput")
    parser.add_argument("--load-tokens", type=int, default=2048, help="of a prompt of the throughput")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer of the throughput")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    args = parser.parse_args()
    if find_spec("sglang") is None:
        print("not measured: sglang is not installed here; make venv-sglang sets up an environment that has it")
        return 0
    results = []
    try:
        arms, pool = (
            find_arms(args.profile),
            read_pool(args.model, Generated(args.documents, DOCUMENT_TOKENS, args.seed)),
        )
        for tp_size in args.tp_size:
            results += measure(args, arms, pool, tp_size)
    except RedKnotError as error:
        print(f"benchmarks.server: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        for found in results:
            show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
