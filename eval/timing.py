"""Time to the first token, in pairs: recompute and one arm on the same ids, one behind the other, taking turns.

Each pair has the documents in an order of its own, the same one for every arm: what requests have in common is their
documents and not a prefix, as it is where documents are retrieved. Hot pairs come behind warm-up pairs that read the
documents; for a cold pair the arm has forgotten them. The files of artifacts are in the page cache either way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from tqdm import tqdm

from eval.arms import RECOMPUTE, Arm
from eval.encoded import Encoded, encoded
from eval.engines.base import ArmEngine, Reply
from eval.guard import objection, slim
from eval.recorder import TIMING_REJECTED, Recorder
from eval.results import Rejected, Timing

State = Literal["hot", "cold"]
COLD_PAIRS = 5
MIN_WARMUP, MIN_PAIRS = 3, 10  # DESIGN 8


@dataclass(frozen=True)
class Pairs:
    """How many pairs are run of each arm and prompt, and the seed of their orders."""

    warmup: int = MIN_WARMUP
    measured: int = MIN_PAIRS
    seed: int = 0

    @property
    def states(self) -> tuple[tuple[State, bool], ...]:
        """(state, warm-up) of each pair, in order."""
        cold: list[tuple[State, bool]] = [("cold", False)] * COLD_PAIRS
        return (*cold, *[("hot", True)] * self.warmup, *[("hot", False)] * self.measured)  # type: ignore[arg-type]


def shuffled(prompt: Encoded, rng: np.random.Generator) -> Encoded:
    """A prompt with its documents in another order; what stands between them keeps its place."""
    documents, parts, at = prompt.documents, [], 0
    order = rng.permutation(len(documents))
    for (start, end), index in zip(prompt.spans, order, strict=True):
        parts += [(prompt.token_ids[at:start], False), (documents[index], True)]
        at = end
    return encoded([*parts, (prompt.token_ids[at:], False)])


@dataclass
class Timer:
    """Times arms over one engine."""

    engine: ArmEngine
    arms: Mapping[str, Arm]
    checkpoint: str  # digest that every arm must name
    pairs: Pairs
    recorder: Recorder

    def time(self, prompts: Iterable[tuple[str, str, Encoded]], total: int) -> None:
        """Time (data set, item, prompt) in every arm that no earlier run has timed."""
        hidden = not sys.stderr.isatty()
        with tqdm(total=total, unit="arm", desc="timing", disable=hidden, leave=False) as bar:
            for dataset, item, prompt in prompts:
                done = self.recorder.timed(dataset, self.pairs.measured)
                for number, arm in enumerate(self.others):
                    if (item, arm) not in done:
                        self._time_arm(dataset, item, prompt, arm, number * len(self.pairs.states))
                    bar.update()

    @property
    def others(self) -> list[str]:
        """The arms that are held to recompute."""
        return [arm for arm in self.arms if arm != RECOMPUTE]

    def _time_arm(self, dataset: str, item: str, prompt: Encoded, arm: str, first: int) -> None:
        """All pairs of one arm, recorded together; numbered from ``first`` on, so that a number is of two records."""
        records: list[Timing] = []
        for turn, (state, warmup) in enumerate(self.pairs.states):
            rng = np.random.default_rng([self.pairs.seed, turn])
            shared = shuffled(prompt, rng)
            if state == "cold":
                self.engine.forget(arm)
            order = (RECOMPUTE, arm) if turn % 2 else (arm, RECOMPUTE)
            for position, name in enumerate(order):
                reply = self.engine.answer(name, shared, 1)
                reason = objection(reply, shared, 1, self.checkpoint, self.arms[name].profile)
                if reason is not None:
                    self.recorder.add(self._rejected(dataset, item, arm, name, reason))
                    return
                record = self._record(dataset, item, first + turn, name, shared, reply)
                records.append(record.model_copy(update={"position": position, "state": state, "warmup": warmup}))
        for record in records:
            self.recorder.add(record)

    def _record(self, dataset: str, item: str, pair: int, arm: str, prompt: Encoded, reply: Reply) -> Timing:
        return Timing(
            run=self.recorder.run.run,
            dataset=dataset,
            item=item,
            pair=pair,
            warmup=False,
            position=0,
            arm=arm,
            state="hot",
            prompt_tokens=len(prompt),
            prompt_sha256=prompt.sha256,
            ttft_request_s=reply.ttft_request_s,
            ttft_forward_s=reply.ttft_forward_s,
            report=slim(reply.report),
        )

    def _rejected(self, dataset: str, item: str, arm: str, ran: str, reason: str) -> Rejected:
        beside = "" if ran == arm else f"{ran} beside it "
        reason = f"{TIMING_REJECTED}{beside}{reason}"
        return Rejected(run=self.recorder.run.run, dataset=dataset, item=item, arm=arm, reason=reason)


def measured(records: Sequence[object], dataset: str, arm: str, state: State = "hot") -> list[float]:
    """The ratios recompute / arm of the request TTFTs of all measured pairs of an arm."""
    sides: dict[tuple[str, str, int], dict[str, float]] = {}
    for one in records:
        if isinstance(one, Timing) and one.dataset == dataset and one.state == state and not one.warmup:
            sides.setdefault((one.run, one.item, one.pair), {})[one.arm] = one.ttft_request_s
    return [side[RECOMPUTE] / side[arm] for side in sides.values() if side.keys() == {RECOMPUTE, arm}]


