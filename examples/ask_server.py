"""Ask a running server the same questions with reuse off and on: ``python -m examples.ask_server --url URL``.

Each prompt is some of the corpus's documents in a random order and a question about one of them. The arms alternate who
goes first, every measured request finds an empty prefix cache, and the time to the first token is the client's own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import requests

from redknot.nano.corpus import questions

ARMS = ("off", "auto")  # values of custom_params.redknot.reuse
WARM_UP = 3  # pairs that are not counted
_LIMIT_S = 300
_ANSWER_TOKENS = 4


@dataclass(frozen=True)
class Row:
    """One answer."""

    number: int
    arm: str
    expected: str
    answer: str
    ttft_s: float  # from the call of the client to the first token that it saw
    report: dict[str, Any]  # the server's own words

    @property
    def right(self) -> bool:
        return self.answer.strip().startswith(self.expected.strip())


class Asker:
    """A client of one server."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=_LIMIT_S)
        self._model = ""

    def wait(self) -> None:
        """Until the server is healthy."""
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            try:
                if requests.get(f"{self._url}/health", timeout=5).status_code == 200:
                    self._model = self._client.models.list().data[0].id
                    return
            except requests.RequestException:
                pass
            time.sleep(0.25)
        raise TimeoutError(f"{self._url} was not healthy within {_LIMIT_S} s")

    def flush(self) -> None:
        """Empty the prefix cache; the server does it when nothing runs."""
        for _ in range(100):
            if requests.post(f"{self._url}/flush_cache", headers=self._headers, timeout=30).status_code == 200:
                return
            time.sleep(0.1)
        raise TimeoutError(f"{self._url}: the prefix cache could not be flushed, since other requests run")

    def ask(self, prompt: str, arm: str) -> tuple[str, float, dict[str, Any]]:
        """Answer, seconds to its first token, and the report that ends the stream."""
        text, first, report = "", None, {}
        started = time.perf_counter()
        stream = self._client.completions.create(
            model=self._model,
            prompt=prompt,
            max_tokens=_ANSWER_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"custom_params": {"redknot": {"reuse": arm}}},
        )
        for chunk in stream:
            if chunk.choices:
                first = time.perf_counter() if first is None else first
                text += chunk.choices[0].text
            elif (found := (chunk.model_extra or {}).get("metadata")) is not None:
                report = found["redknot"][0]
        if first is None or not report:
            raise RuntimeError(f"{self._url}: a stream ended without a token or without a report")
        return text, first - started, report


def prompts(corpus: Path, count: int, documents: int, seed: int) -> list[tuple[str, str]]:
    """(prompt, expected answer) of random documents in random order."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(corpus.glob("*.txt"))]
    if len(texts) < documents:
        raise ValueError(f"{corpus}: {len(texts)} .txt documents, {documents} are needed for a prompt")
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        chosen = [texts[i] for i in rng.permutation(len(texts))[:documents]]
        facts = [fact for text in chosen for fact in questions(text)]
        question, expected = facts[rng.integers(len(facts))]
        found.append(("".join(chosen) + question, expected))
    return found


def measure(asker: Asker, asked: Sequence[tuple[str, str]]) -> list[Row]:
    """All arms of all prompts; the first ones warm up."""
    rows = []
    for number, (prompt, expected) in enumerate(asked):
        for arm in ARMS if number % 2 else reversed(ARMS):
            asker.flush()
            answer, seconds, report = asker.ask(prompt, arm)
            if number >= WARM_UP:
                rows.append(Row(number - WARM_UP, arm, expected, answer, seconds, report))
    return sorted(rows, key=lambda row: (row.number, ARMS.index(row.arm)))


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Medians of the arms, and of the ratio of each pair."""
    arms = {arm: [row for row in rows if row.arm == arm] for arm in ARMS}
    pairs = list(zip(arms["off"], arms["auto"], strict=True))
    saved = [row.report["ledgers"]["arithmetic"]["share"] for row in arms["auto"]]
    return {
        "questions": len(pairs),
        "prompt_tokens": statistics.median(row.report["prompt_tokens"] for row in rows),
        "ttft_ms": {arm: 1000 * statistics.median(row.ttft_s for row in found) for arm, found in arms.items()},
        "right": {arm: sum(row.right for row in found) for arm, found in arms.items()},
        "reused": sum(row.report["arm"] == "reuse" for row in arms["auto"]),
        "ratio_client": statistics.median(off.ttft_s / auto.ttft_s for off, auto in pairs),
        "ratio_engine": statistics.median(
            off.report["ttft_request_s"] / auto.report["ttft_request_s"] for off, auto in pairs
        ),
        "ratio_of_flops": statistics.median(1 / (1 - share) for share in saved),
    }


def show(rows: Sequence[Row], found: dict[str, Any]) -> None:
    """The table."""
    head = (f"{'TTFT ms':>8}", f"{'engine':>8}", f"{'forward':>8}", f"{'reused':>10}")
    print(f"{'#':>2}  {'reuse':<5} {'answer':<14} {'':<5}", *head, " reason")
    for row in rows:
        report, mark = row.report, "right" if row.right else "wrong"
        answer = " ".join(row.answer.split())[:14]
        reused = f"{report['reused_tokens']}/{report['prompt_tokens']}"
        engine, forward = 1000 * report["ttft_request_s"], 1000 * report["ttft_forward_s"]
        print(
            f"{row.number + 1:>2}  {row.arm:<5} {answer:<14} {mark:<5} {1000 * row.ttft_s:>8.1f} {engine:>8.1f} "
            f"{forward:>8.1f} {reused:>10}  {report['reason'] or ''}"
        )
    print()
    for arm in ARMS:
        print(f"{arm:<5} {found['right'][arm]}/{found['questions']} right  TTFT {found['ttft_ms'][arm]:.1f} ms")
    print(
        f"{found['ratio_client']:.2f}x faster to the first token at the client, {found['ratio_engine']:.2f}x in the "
        f"engine (its FLOPs allow {found['ratio_of_flops']:.2f}x); {found['reused']} of {found['questions']} reused"
    )


def main() -> int:
    """Command line; 1 when a request that could reuse did not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="for example http://127.0.0.1:30000")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--corpus", type=Path, default=Path("examples/corpus"), help="default: %(default)s")
    parser.add_argument("--questions", type=int, default=10, help="measured pairs (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=4, help="documents in a prompt (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args()
    if min(args.questions, args.documents) < 1 or args.seed < 0:
        parser.error("--questions and --documents must be at least 1, --seed at least 0")
    asker = Asker(args.url.rstrip("/"), args.api_key)
    try:
        asked = prompts(args.corpus, WARM_UP + args.questions, args.documents, args.seed)
        asker.wait()
        rows = measure(asker, asked)
    except (ValueError, OSError, RuntimeError, openai.OpenAIError) as error:
        print(f"ask_server: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    found = summary(rows)
    if args.json:
        print(json.dumps({"summary": found, "rows": [asdict(row) | {"right": row.right} for row in rows]}))
    else:
        show(rows, found)
    return 0 if found["reused"] == found["questions"] else 1


if __name__ == "__main__":
    sys.exit(main())
