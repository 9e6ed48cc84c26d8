"""Rounds of every arm at every level, in turns; what a folder has is not run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from eval.arms import Arm
from eval.encoded import Encoded
from eval.engines.base import Reply
from eval.engines.server import Server
from eval.engines.wire import Request, ServerError, Stream
from eval.engines.wishes import Wishes
from eval.guard import slim
from eval.progress import progress
from eval.recorder import Recorder
from eval.results import Load
from eval.serving.client import Done, Shot, closed_loop, open_loop
from eval.serving.workload import Pool, arrivals
from eval.turns import order


@dataclass(frozen=True)
class Plan:
    """What is to be run. ``levels`` are arrivals a second, or clients in a closed loop."""

    dataset: str
    loop: Literal["open", "closed"]
    levels: tuple[float, ...]
    rounds: int
    requests: int  # of a round
    documents: int  # of a prompt
    new_tokens: int
    seed: int

    def prompts(self, pool: Pool, number: int) -> list[Encoded]:
        """The prompts of a round, the same ones for every arm and level."""
        return pool.prompts(self.requests, self.documents, [self.seed, number])

    def arrivals(self, level: float, number: int) -> list[float]:
        """When they arrive: the same pattern at every level, slower or faster."""
        return arrivals(self.requests, level, [self.seed, number])


@dataclass(frozen=True)
class Turn:
    """One round of one arm."""

    level: float
    number: int
    arm: str


def turns(plan: Plan, arms: Sequence[str], recorder: Recorder) -> list[Turn]:
    """What is left to run; a round that was cut is run again."""
    have = Counter(
        Turn(one.level, one.round, one.arm)
        for one in recorder.records
        if isinstance(one, Load) and (one.dataset, one.loop) == (plan.dataset, plan.loop)
    )
    every = (
        Turn(level, number, arm)
        for number in range(plan.rounds)
        for level in plan.levels
        for arm in order(arms, number)
    )
    return [turn for turn in every if have[turn] < plan.requests]


class Loader:
    """Runs rounds against one server."""

    def __init__(
        self, server: Server, arms: Mapping[str, Arm], checkpoint: str, pool: Pool, plan: Plan, recorder: Recorder
    ) -> None:
        self._server = server
        self._checkpoint = checkpoint  # digest that the server named
        self._pool = pool
        self._plan = plan
        self._recorder = recorder
        self._wishes = Wishes(arms)

    def warm_up(self, arms: Sequence[str]) -> None:
        """Every document once in every arm; ServerError when an arm does not do what its name says."""
        prompts = self._pool.warming(self._plan.documents)
        with progress(len(arms) * len(prompts), "request", "warm-up") as bar:
            for arm in arms:
                for prompt in prompts:
                    request = self._wishes.request(arm, prompt, 1, exact=True)
                    try:
                        self._wishes.counted(arm, self._server.ask(request), self._checkpoint)
                    except ServerError as error:
                        raise ServerError(f"arm {arm} cannot be measured: {error}") from None
                    bar.update()

    def run(self, left: Sequence[Turn]) -> None:
        """All rounds in order; an interrupt leaves those that have ended."""
        with progress(len(left) * self._plan.requests, "request", "rounds") as bar:
            for turn in left:
                bar.set_description(f"{turn.arm}, {turn.level:g}, round {turn.number + 1}", refresh=False)
                for load in self._records(turn, self._shots(turn, bar.update)):
                    self._recorder.add(load)

    def _shots(self, turn: Turn, done: Done) -> list[Shot]:
        """One round over an empty prefix cache."""
        self._server.flush()
        self._wishes.begin()
        plan, requests = self._plan, self._requests(turn)

        def read(stream: Stream) -> Reply:
            return self._wishes.counted(turn.arm, stream, self._checkpoint)

        if plan.loop == "closed":
            return closed_loop(self._server.url, requests, int(turn.level), read, done)
        return open_loop(self._server.url, requests, plan.arrivals(turn.level, turn.number), read, done)

    def _requests(self, turn: Turn) -> list[Request]:
        prompts = self._plan.prompts(self._pool, turn.number)
        return [self._wishes.request(turn.arm, prompt, self._plan.new_tokens, exact=True) for prompt in prompts]

    def _records(self, turn: Turn, shots: Sequence[Shot]) -> Iterator[Load]:
        prompts = self._plan.prompts(self._pool, turn.number)
        for shot in shots:
            reply = shot.reply
            times = {} if reply is None else {name: reply.report[name] for name in ("ttft_request_s", "ttft_forward_s")}
            yield Load(
                run=self._recorder.run.run,
                dataset=self._plan.dataset,
                arm=turn.arm,
                level=turn.level,
                round=turn.number,
                number=shot.number,
                arrived_s=shot.arrived_s,
                ttft_s=shot.ttft_s,
                latency_s=shot.latency_s,
                prompt_tokens=len(prompts[shot.number]),
                new_tokens=shot.new_tokens,
                error=shot.error,
                report={} if reply is None else slim(reply.report) | times,
                loop=self._plan.loop,
                late_s=shot.late_s,
            )
