"""Time of the content matcher on one thread with a hot index: ordinary prompts and the worst ones we know.

OMP_NUM_THREADS=1 python -m benchmarks.match --runs 25
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from redknot.plan.hashing import Tokens
from redknot.plan.match import match_tokens
from redknot.plan.token_index import TokenIndex

VOCABULARY = 129280
REPEATED = 17


@dataclass(frozen=True)
class Case:
    """One corpus kind and one prompt kind; `limit_ms` is what it may take, or None where the case is extra."""

    name: str
    corpus: str
    prompt: str
    limit_ms: float | None


CASES = (
    Case("normal: 30 documents in the prompt", "random", "documents", 25.0),
    Case("no match", "random", "random", 25.0),
    Case("repeated-token prompt", "random", "repeated", 100.0),
    Case("shared first block, 30 documents", "shared", "documents", 100.0),
    Case("shared first block, prompt repeats it", "shared", "shared blocks", 100.0),
    Case("documents of one repeated token, prompt too", "repeated", "repeated", 100.0),
    Case("repetitions with own tails, repeated prompt", "repeated+tail", "repeated", 100.0),
    Case("repetitions with own tails, 30 documents", "repeated+tail", "documents", 100.0),
    Case("repetitions with own tails, blocks and junk", "repeated+tail", "repeated blocks", 100.0),
    Case("half repetition, half own, repeated prompt", "half", "repeated", 100.0),
    Case("half repetition, half own, 30 documents", "half", "documents", None),
    Case("overlapping chunks (stride 100), 30 documents", "chunks", "documents", None),
    Case("one document in 10,000 edits, 30 of them", "edits", "documents", None),
    Case("one document under 10,000 names, 30 times", "copies", "documents", None),
    Case("two-token noise documents and prompt", "binary", "binary", None),
)


@dataclass(frozen=True)
class Corpus:
    """The sizes, and the documents and prompts made from them."""

    documents: int
    length: int
    prompt: int
    block: int

    def document_ids(self, kind: str, rng: np.random.Generator) -> Iterator[Tokens]:
        """The documents of one kind, one by one."""
        stream = self._random(rng, self.length + (100 * self.documents if kind == "chunks" else 0))
        for number in range(self.documents):
            tokens = self._random(rng, self.length)
            if kind == "shared":
                tokens[: self.block] = np.arange(self.block)
            elif kind == "repeated":
                tokens = np.full(self.length - number % self.block, REPEATED, np.int32)
            elif kind == "repeated+tail":
                tokens = tokens[: self.length - number % self.block]
                tokens[: self.length - self.block] = REPEATED
            elif kind == "half":
                tokens[: self.length // 2] = REPEATED
            elif kind == "chunks":
                tokens = stream[100 * number : 100 * number + self.length]
            elif kind in ("edits", "copies"):
                edited = tokens[0] * (kind == "edits")
                tokens[:] = stream
                tokens[number * 7919 % self.length] += edited
            elif kind == "binary":
                tokens %= 2
            yield tokens

    def prompt_ids(self, kind: str, documents: list[Tokens], rng: np.random.Generator) -> Tokens:
        """A prompt of exactly `prompt` tokens."""
        prompt = self._random(rng, self.prompt)
        if kind == "documents":
            pieces: list[Tokens] = []
            for number in rng.choice(len(documents), 30):
                pieces += [self._random(rng, int(rng.integers(1, 200))), documents[number]]
            whole = np.concatenate([*pieces, prompt])
            return whole[: self.prompt]
        if kind == "repeated":
            prompt[:] = REPEATED
        elif kind == "shared blocks":
            prompt = np.resize(np.arange(self.block, dtype=np.int32), self.prompt)
        elif kind == "repeated blocks":
            for start in range(0, self.prompt, self.block + 1):
                prompt[start : start + self.block] = REPEATED
        elif kind == "binary":
            prompt %= 2
        return prompt

    @staticmethod
    def _random(rng: np.random.Generator, length: int) -> Tokens:
        return rng.integers(0, VOCABULARY, length, dtype=np.int32)


def _milliseconds(call: Callable[[], object], runs: int) -> list[float]:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - started))
    return sorted(times)


def measure(sizes: Corpus, runs: int, seed: int) -> list[dict[str, object]]:
    """All cases; each corpus is built once."""
    rows: list[dict[str, object]] = []
    for kind in dict.fromkeys(case.corpus for case in CASES):
        rng = np.random.default_rng(seed)
        index = TokenIndex(sizes.block)
        documents = list(sizes.document_ids(kind, rng))
        started = time.perf_counter()
        for number, tokens in enumerate(documents):
            index.add(str(number), tokens)
        added = time.perf_counter() - started
        sealing = _milliseconds(index.segments, 1)[0]
        for case in (case for case in CASES if case.corpus == kind):
            prompt = sizes.prompt_ids(case.prompt, documents, rng)
            before = dict(index.counters)
            found = match_tokens(prompt, index)
            counted = {name: index.counters[name] - before[name] for name in before}
            times = _milliseconds(lambda: match_tokens(prompt, index), runs)  # noqa: B023
            row: dict[str, object] = {
                **asdict(case),
                "median_ms": statistics.median(times),
                "min_ms": times[0],
                "p95_ms": times[int(0.95 * (runs - 1))],
                "matches": len(found),
                "matched_tokens": sum(match.length for match in found),
                "add_s": added,
                "seal_ms": sealing,
                **counted,
            }
            rows.append(row)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--length", type=int, default=4096, help="tokens per document")
    parser.add_argument("--prompt", type=int, default=131_072, help="tokens in the prompt")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--runs", type=int, default=25, help="timed searches per case (at least 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.runs < 20:
        parser.error(f"--runs {options.runs}: medians need at least 20 runs")
    sizes = Corpus(options.documents, options.length, options.prompt, options.block)
    rows = measure(sizes, options.runs, options.seed)
    if options.json:
        print(json.dumps({"sizes": asdict(sizes), "seed": options.seed, "cases": rows}, indent=2))
        return
    print(f"{sizes.prompt} prompt tokens, {sizes.documents} documents of {sizes.length}, block {sizes.block}, ms")
    print(f"{'case':<46}{'median':>8}{'min':>8}{'p95':>8}{'limit':>7}{'runs':>6}{'tokens':>8}{'cut':>5}{'seal':>7}")
    for row in rows:
        print(
            f"{row['name']:<46}{row['median_ms']:>8.2f}{row['min_ms']:>8.2f}{row['p95_ms']:>8.2f}"
            f"{row['limit_ms'] or '-':>7}{row['matches']:>6}{row['matched_tokens']:>8}"
            f"{row['match_cut_short']:>5}{row['seal_ms']:>7.0f}"
        )


if __name__ == "__main__":
    main()
