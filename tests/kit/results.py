"""Plausible records of an evaluation, made up: what a report is tested on without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from eval.results import Answer, Build, Fidelity, Load, Rejected, Results, Run, Timing
from redknot.model.profile import SHIPPED, load_profile

ROOT = Path(__file__).resolve().parents[2]
FILES = ("plain", "deviation", "rowsparse-20", "rowsparse-25", "fixed-3", "adaptive-80")
# arm -> (share of right answers that stay right on "latest", speed-up, share of FLOPs saved)
ARMS = {
    "recompute": (1.0, 1.0, 0.0),
    "headsplit": (0.7, 1.15, 0.2),
    "combined": (0.96, 2.3, 0.72),
    "rowsparse": (0.965, 2.2, 0.7),
    "rowsparse-20": (0.985, 1.8, 0.6),
    "rowsparse-25": (0.99, 1.6, 0.55),
    "fixed-3": (0.95, 2.5, 0.78),
    "adaptive-80": (0.96, 2.35, 0.74),
    "deviation": (0.8, 2.6, 0.8),
    "turbo": (0.65, 6.5, 0.93),
    "plain": (0.6, 7.4, 0.95),
    "no-documents": (0.0, 20.0, 0.0),
}
SETS = {"single": 0.98, "latest": 0.97}
MODEL = {"name": "models/nano", "config": "c" * 64, "weights": "e" * 64, "tokenizer": "f" * 64}


@dataclass
class Evaluation:
    """A run and its records, as a harness would write them."""

    run: Run
    records: list[Any]

    def write(self, folder: Path) -> Path:
        """As a results file."""
        results = Results(folder)
        for record in (self.run, *self.records):
            results.add(record)
        results.close()
        return results.path


def profiles(arms: Iterator[str] | tuple[str, ...]) -> dict[str, dict[str, Any]]:
    found = {}
    for arm in arms:
        if arm in SHIPPED or arm in FILES:
            name = arm if arm in SHIPPED else str(ROOT / "configs" / "profiles" / f"{arm}.json")
            found[arm] = load_profile(name).model_dump(mode="json")
    return found


def make_run(run: str = "run-1", arms: tuple[str, ...] = tuple(ARMS), **other: Any) -> Run:
    chosen = profiles(arms)
    facts: dict[str, Any] = {
        "run": run,
        "tool": "nanoqa",
        "started": "2026-01-02T03:04:05Z",
        "command": ("python", "-m", "eval.nanoqa", "--out", "build/eval"),
        "commit": "0123456789abcdef",
        "versions": {"redknot": "0.1.0", "python": "3.11.9", "torch": "2.13.0"},
        "hardware": {"processor": "some processor", "cores": 2, "threads": 1, "memory_bytes": 8 << 30, "device": "cpu"},
        "model": MODEL,
        "engine": "embedded",
        "tp": 1,
        "arms": chosen,
        "digests": {arm: sha256(str(profile).encode()).hexdigest() for arm, profile in chosen.items()},
        "options": {"seed": 1, "contexts": 20},
    }
    return Run(**(facts | other))


def engine_report(arm: str, tokens: int, saved: float, seconds: float) -> dict[str, Any]:
    def share(part: float) -> dict[str, float]:
        return {"share": part, "saved": int(part * 12 * tokens), "whole": 12 * tokens}

    return {
        "arm": "dense" if arm in ("recompute", "no-documents") else "reuse",
        "documents": [{"start": 1 + 512 * n, "length": 512, "reused": int(512 * saved)} for n in range(tokens // 512)],
        "ledgers": {
            "head_rows": share(0.9 * saved),
            "token_rows": share(saved),
            "arithmetic": share(0.95 * saved),
            "wall_clock": {"ttft_request_s": seconds, "ttft_forward_s": 0.95 * seconds, "match_s": 0.001},
        },
    }


def answers(run: Run, arms: tuple[str, ...], contexts: int, questions: int, seed: int = 0) -> Iterator[Answer]:
    rng = np.random.default_rng(seed)
    for dataset, share in SETS.items():
        for context in range(contexts):
            hard = rng.random() < 0.5
            for question in range(questions):
                known = bool(rng.random() < share)
                for arm in arms:
                    keeps = 1.0 if dataset == "single" and arm != "no-documents" else ARMS[arm][0]
                    lost = rng.random() > keeps * (0.94 if hard else 1.0) / 0.97
                    right = known and not lost if arm != "recompute" else known
                    yield Answer(
                        run=run.run,
                        dataset=dataset,
                        item=f"{context}-{question}",
                        cluster=str(context),
                        arm=arm,
                        prompt_tokens=2000,
                        prompt_sha256=f"{dataset}-{context}-{question}" + ("-alone" if arm == "no-documents" else ""),
                        max_new_tokens=8,
                        cut=False,
                        text="swan 107." if right else f"heron {int(rng.integers(100, 999))}.",
                        references=("swan 107",),
                        score=float(right),
                        kl=None if arm == "recompute" else float(rng.exponential(0.02 + 1 - keeps)),
                        top1=None if arm == "recompute" else right == known,
                        report=engine_report(arm, 2048, ARMS[arm][2], 0.3),
                    )


def timings(
    run: Run, arms: tuple[str, ...], pairs: int = 10, lengths: tuple[int, ...] = (1049, 2073, 4121)
) -> Iterator[Timing]:
    rng = np.random.default_rng(5)
    for state in ("hot", "cold"):
        for tokens in lengths:
            for pair in range(-1, pairs):
                for position, arm in enumerate(arms if pair % 2 else arms[::-1]):
                    _, faster, saved = ARMS[arm]
                    if state == "cold":
                        faster = 1 + 0.7 * (faster - 1)
                    seconds = float(0.00035 * tokens**1.05 / faster * rng.lognormal(0, 0.05))
                    yield Timing(
                        run=run.run,
                        dataset="single",
                        item=f"{tokens}",
                        pair=pair,
                        warmup=pair < 0,
                        position=position,
                        arm=arm,
                        state=state,
                        prompt_tokens=tokens,
                        prompt_sha256=f"timing-{tokens}",
                        ttft_request_s=seconds,
                        ttft_forward_s=0.95 * seconds,
                        report=engine_report(arm, tokens, saved, seconds),
                    )


def fidelity(run: Run, arms: tuple[str, ...], prompts: int = 6, layers: int = 12) -> Iterator[Fidelity]:
    rng = np.random.default_rng(6)
    for arm in (*arms, "noise-floor"):
        if arm in ("recompute", "no-documents"):
            continue
        size = 1e-6 if arm == "noise-floor" else 0.6 - 0.5 * ARMS[arm][0]
        for prompt in range(prompts):
            yield Fidelity(
                run=run.run,
                dataset="latest",
                item=str(prompt),
                arm=arm,
                prompt_tokens=2000,
                layers=tuple(float(size * (1 + layer) / layers * rng.lognormal(0, 0.2)) for layer in range(layers)),
                kl=float(size * rng.exponential()),
                top1=float(min(1, max(0, 1 - size * rng.exponential()))),
            )


def loads(run: Run, arms: tuple[str, ...], rounds: int = 4, requests: int = 12) -> Iterator[Load]:
    rng = np.random.default_rng(7)
    for level in (0.5, 1.0, 2.0, 4.0):
        for turn in range(rounds):
            planned = np.cumsum(rng.exponential(1 / level, requests))
            for arm in arms:
                free = 0.0
                for number, arrived in enumerate(planned):
                    seconds = float(0.6 / ARMS[arm][1] * rng.lognormal(0, 0.1))
                    started = max(float(arrived), free)
                    free = started + seconds + 0.1
                    yield Load(
                        run=run.run,
                        dataset="fixed-output",
                        arm=arm,
                        level=level,
                        round=turn,
                        number=number,
                        arrived_s=float(arrived),
                        ttft_s=started + seconds - float(arrived),
                        latency_s=free - float(arrived),
                        prompt_tokens=2048,
                        new_tokens=16,
                        error="" if rng.random() < 0.98 else "timed out",
                        report={"arm": "reuse" if arm != "recompute" else "dense"},
                    )


def evaluation(arms: tuple[str, ...] = tuple(ARMS), contexts: int = 20, questions: int = 5) -> Evaluation:
    """Everything that a report shows, of one run."""
    run = make_run(arms=arms)
    timed = tuple(arm for arm in arms if arm != "no-documents")
    served = tuple(arm for arm in arms if arm in ("recompute", "rowsparse", "turbo"))
    records = [
        Build(run=run.run, dataset="single", documents=24, tokens=12288, found=4, seconds=3.9, bytes=99_100_000),
        *answers(run, arms, contexts, questions),
        *timings(run, timed),
        *fidelity(run, arms),
        *loads(run, served),
        Rejected(run=run.run, dataset="latest", item="3-1", arm="turbo", reason="ran dense: nothing_to_reuse"),
    ]
    return Evaluation(run, records)
