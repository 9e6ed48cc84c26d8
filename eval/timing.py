"""Time to the first token, in pairs: recompute and one arm on the same ids, one behind the other, taking turns.

Each pair has the documents in an order of its own, the same one for every arm: what requests have in common is their
documents and not a prefix, as it is where documents are retrieved. Of fewer than four documents there are fewer orders
than pairs, so that a prefix cache meets whole prompts again. Hot pairs come behind warm-up pairs that read the
documents; for a cold pair the arm has forgotten them. The files of artifacts are in the page cache either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import factorial
from typing import Literal

import numpy as np

from eval.arms import Arm
from eval.encoded import Encoded, encoded
from eval.engines.base import ArmEngine, Reply
from eval.guard import objection, slim
from eval.names import RECOMPUTE, TIMING_REJECTED
from eval.progress import progress
from eval.recorder import Recorder
from eval.results import Rejected, Timing

State = Literal["hot", "cold"]
COLD_PAIRS = 5
MIN_WARMUP, MIN_PAIRS = 3, 10  # DESIGN 8


@dataclass(frozen=True)
class Turn:
    """One pair, before it is run."""

    state: State
    warmup: bool


@dataclass(frozen=True)
class Pairs:
    """How many pairs are run of each arm and prompt, and the seed of their orders."""

    warmup: int = MIN_WARMUP
    measured: int = MIN_PAIRS
    seed: int = 0

    @property
    def turns(self) -> list[Turn]:
        """The pairs in order: the cold ones, the warm-up, the measured ones."""
        hot = [Turn("hot", True)] * self.warmup + [Turn("hot", False)] * self.measured
        return [Turn("cold", False)] * COLD_PAIRS + hot


def orders(documents: int, turns: int, seed: int) -> list[tuple[int, ...]]:
    """Random orders of some documents, one a turn; none comes twice before all have come."""
    rng, seen, found = np.random.default_rng(seed), set[tuple[int, ...]](), list[tuple[int, ...]]()
    while len(found) < turns:
        order = tuple(rng.permutation(documents).tolist())
        if order not in seen or len(seen) == factorial(documents):
            seen.add(order)
            found.append(order)
    return found


def reordered(prompt: Encoded, order: Sequence[int]) -> Encoded:
    """A prompt with its documents in another order; what stands between them keeps its place."""
    documents, parts, at = prompt.documents, [], 0
    for (start, end), index in zip(prompt.spans, order, strict=True):
        parts += [(prompt.token_ids[at:start], False), (documents[index], True)]
        at = end
    return encoded([*parts, (prompt.token_ids[at:], False)])


def _documents(reply: Reply) -> list[dict[str, object]]:
    """Each document of a timed request: its length, and what was read of it."""
    kept = ("length", "reused", "recomputed", "cached", "reason")
    return [{name: one[name] for name in kept} for one in reply.report["documents"]]


def untimed(recorder: Recorder, dataset: str, item: str, arms: Iterable[str], pairs: Pairs) -> list[str]:
    """The arms of an item that are still to be timed."""
    done = recorder.timed(dataset, item, pairs.measured)
    return [arm for arm in arms if arm != RECOMPUTE and arm not in done]


@dataclass
class Timer:
    """Times arms over one engine."""

    engine: ArmEngine
    arms: Mapping[str, Arm]
    checkpoint: str  # digest that every arm must name
    pairs: Pairs
    recorder: Recorder

    def time(self, prompts: Sequence[tuple[str, str, Encoded]]) -> None:
        """Time (data set, item, prompt) in every arm that no earlier run has timed."""
        left = [(one, arm) for one in prompts for arm in untimed(self.recorder, *one[:2], self.arms, self.pairs)]
        with progress(len(left), "arm", "timing") as bar:
            for (dataset, item, prompt), arm in left:
                self._time_arm(dataset, item, prompt, arm)
                bar.update()

    def _time_arm(self, dataset: str, item: str, prompt: Encoded, arm: str) -> None:
        """All pairs of one arm, recorded together. No two pairs of an item share a number, whatever their runs."""
        records: list[Timing] = []
        first = 1 + max((one.pair for one in self.recorder.timings(dataset, item)), default=-1)
        turns = self.pairs.turns
        for number, order in enumerate(orders(len(prompt.spans), len(turns), self.pairs.seed)):
            turn, shared = turns[number], reordered(prompt, order)
            if turn.state == "cold":
                self.engine.forget(arm)
            for position, name in enumerate((RECOMPUTE, arm) if number % 2 else (arm, RECOMPUTE)):
                reply = self.engine.answer(name, shared, 1)
                reason = objection(reply, shared, 1, self.checkpoint, self.arms[name].profile)
                if reason is not None:
                    self.recorder.add(self._rejected(dataset, item, arm, name, reason))
                    return
                records.append(
                    Timing(
                        run=self.recorder.run.run,
                        dataset=dataset,
                        item=item,
                        pair=first + number,
                        warmup=turn.warmup,
                        position=position,
                        arm=name,
                        state=turn.state,
                        prompt_tokens=len(shared),
                        prompt_sha256=shared.sha256,
                        ttft_request_s=reply.ttft_request_s,
                        ttft_forward_s=reply.ttft_forward_s,
                        report=slim(reply.report) | {"documents": _documents(reply)},
                    )
                )
        for record in records:
            self.recorder.add(record)

    def _rejected(self, dataset: str, item: str, arm: str, ran: str, reason: str) -> Rejected:
        beside = "" if ran == arm else f"{ran} beside it "
        reason = f"{TIMING_REJECTED}{beside}{reason}"
        return Rejected(run=self.recorder.run.run, dataset=dataset, item=item, arm=arm, reason=reason)
