"""TTFT and throughput of the SGLang server: the same prompts with reuse off and on, measured at the client.

    .venv-sglang/bin/python -m benchmarks.server --tokens 1024 2048 4096 --tp-size 1 2 --clients 1 4 16

Starts the server on a free port of the loopback, over documents of 512 tokens from nano's generator. TTFT: three
warm-up pairs, then pairs in alternating order; the prefix cache is flushed before every request, so that neither arm
finds what the other one left. The client's TTFT is the time to the first token of a stream; the engine's is in the
report. Throughput: as many clients as asked for, each sends its next request when it has the answer before; every
prompt is another choice of documents, the answers have a fixed length, and the prefix cache is emptied before each
round alone. A request of the reuse arm that ran dense ends the benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from eval.statistics import Interval, ratio
from redknot.nano.corpus import questions, write_corpus

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT_TOKENS = 512
FACTS = 6  # of a document
STARTING_S = 300
ARMS = ("off", "required")


@contextmanager
def server(model: Path, store: Path, profile: str, tp_size: int) -> Iterator[tuple[str, float]]:
    """A server over a store: its address, and the seconds until it was healthy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"),
        *("--enable-redknot", "--redknot-store", str(store), "--redknot-profile", profile),
        *("--host", "127.0.0.1", "--port", str(port), "--tp-size", str(tp_size)),
    ]
    url, started = f"http://127.0.0.1:{port}", time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
        try:
            while not _healthy(url):
                if process.poll() is not None or time.perf_counter() - started > STARTING_S:
                    log.seek(0)
                    raise SystemExit(f"the server did not start:\n{log.read()[-3000:].decode(errors='replace')}")
                time.sleep(0.2)
            yield url, time.perf_counter() - started
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def post(url: str, body: Mapping[str, Any] | None = None) -> Any:
    """An answer to be read; SystemExit with what the server says against it."""
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=600)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"the server answered {error.code}: {error.read(300).decode(errors='replace')}") from None


def flush(url: str) -> None:
    """Empty the prefix cache."""
    with post(f"{url}/flush_cache"):
        pass


def ask(url: str, ids: Sequence[int], arm: str, tokens: int = 1) -> tuple[float, float, dict[str, Any]]:
    """One streamed request: seconds to the first token, seconds to the last, and the report."""
    body = {
        "input_ids": list(ids),
        "stream": True,
        "sampling_params": {
            "max_new_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "custom_params": {"redknot": {"reuse": arm}},
        },
    }
    started, first, last = time.perf_counter(), 0.0, {}
    with post(f"{url}/generate", body) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - started
                last = json.loads(line[6:])
    report = last.get("meta_info", {}).get("redknot")
    if report is None:
        raise SystemExit(f"no report came with the answer: {json.dumps(last)[:300]}")
    if arm != "off" and report["arm"] != "reuse":
        raise SystemExit(f"the reuse arm ran dense: {report['reason']} ({report['detail']})")
    return first, time.perf_counter() - started, report


def measure_ttft(url: str, ids: Sequence[int], pairs: int) -> dict[str, Any]:
    """The pairs of one length."""
    client: dict[str, list[float]] = {arm: [] for arm in ARMS}
    engine: dict[str, list[float]] = {arm: [] for arm in ARMS}
    reused = 0
    for number in range(3 + pairs):
        for arm in ARMS if number % 2 else ARMS[::-1]:
            flush(url)
            seconds, _, report = ask(url, ids, arm)
            reused = max(reused, report["reused_tokens"])
            if number >= 3:
                client[arm].append(seconds)
                engine[arm].append(report["ttft_request_s"])
    return {
        "tokens": len(ids),
        "reused": reused,
        "client": asdict(ratio(client["off"], client["required"])),
        "engine": asdict(ratio(engine["off"], engine["required"])),
        "client_ms": {arm: 1000 * statistics.median(client[arm]) for arm in ARMS},
        "engine_ms": {arm: 1000 * statistics.median(engine[arm]) for arm in ARMS},
    }


def measure_throughput(url: str, prompts: Sequence[Sequence[int]], clients: int, answer: int) -> dict[str, Any]:
    """Requests a second of both arms over the same prompts, in turns, three rounds."""
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with ThreadPoolExecutor(clients) as pool:
        for number in range(4):
            for arm in ARMS if number % 2 else ARMS[::-1]:
                flush(url)
                started = time.perf_counter()
                list(pool.map(lambda ids, arm=arm: ask(url, ids, arm, answer), prompts))  # type: ignore[misc]
                if number:
                    rates[arm].append(len(prompts) / (time.perf_counter() - started))
    return {
        "clients": clients,
        "requests_per_s": {arm: statistics.median(rates[arm]) for arm in ARMS},
        "ratio": asdict(ratio(rates["required"], rates["off"])),
    }


class Prompts:
    """Requests over a corpus: BOS, some documents, a question about one of them."""

    def __init__(self, corpus: Path, inner: Tokenizer, seed: int) -> None:
        texts = [path.read_text(encoding="utf-8") for path in sorted(corpus.glob("*.txt"))]
        self._documents = [self._ids(inner, text) for text in texts]
        self._questions = [self._ids(inner, question) for text in texts for question, _ in questions(text)]
        self._dice = random.Random(seed)

    def of(self, tokens: int) -> list[int]:
        """About so many tokens, of documents in another order each time."""
        picked = self._dice.sample(self._documents, max(tokens // DOCUMENT_TOKENS, 1))
        return [0, *(one for ids in picked for one in ids), *self._dice.choice(self._questions)]

    @staticmethod
    def _ids(inner: Tokenizer, text: str) -> list[int]:
        return list(inner.encode(text, add_special_tokens=False).ids)


def build(model: Path, corpus: Path, store: Path, profile: str) -> None:
    """The corpus as artifacts."""
    command = [sys.executable, "-m", "redknot", "build", str(corpus), "--model", str(model), "--store", str(store)]
    subprocess.run([*command, "--profile", profile], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def run(args: argparse.Namespace, url: str, prompts: Prompts) -> dict[str, Any]:
    """Everything that is measured of one server."""
    return {
        "ttft": [measure_ttft(url, prompts.of(tokens), args.pairs) for tokens in args.tokens],
        "throughput": [
            measure_throughput(url, [prompts.of(args.load_tokens) for _ in range(args.requests)], clients, args.answer)
            for clients in args.clients
        ],
    }


def show(found: dict[str, Any]) -> None:
    """The tables of one server."""
    print(f"\nTP{found['tp_size']}, {found['profile']}: healthy after {found['startup_s']:.0f} s")
    print("tokens  reused  client off/on ms         ratio                engine off/on ms         ratio")
    for row in found["ttft"]:
        parts = []
        for where in ("client", "engine"):
            ms, of = row[f"{where}_ms"], row[where]
            times = f"{ms['off']:8.1f} / {ms['required']:8.1f}"
            parts.append(f"{times}  {Interval(**of):.2f}")
        print(f"{row['tokens']:6}  {row['reused']:6}  {'  '.join(parts)}")
    for row in found["throughput"]:
        rates, of = row["requests_per_s"], row["ratio"]
        print(
            f"{row['clients']:3} clients: {rates['off']:.2f} requests/s dense, {rates['required']:.2f} with reuse, "
            f"ratio {Interval(**of):.2f}"
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models/nano")
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
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        inner = Tokenizer.from_file(str(args.model / "tokenizer.json"))
        write_corpus(corpus, inner, args.documents, DOCUMENT_TOKENS, FACTS, args.seed)
        for profile in args.profile:
            store = Path(folder) / profile
            build(args.model, corpus, store, profile)
            for tp_size in args.tp_size:
                prompts = Prompts(corpus, inner, args.seed)
                with server(args.model, store, profile, tp_size) as (url, startup):
                    found = {"profile": profile, "tp_size": tp_size, "startup_s": startup}
                    results.append(found | run(args, url, prompts))
                if not args.json:
                    show(results[-1])
    if args.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
