"""A whole evaluation: artifacts, the answers of all arms, and their times; what a folder has is not done again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from eval.artifacts import Builder
from eval.encoded import Encoded
from eval.engines.base import ArmEngine
from eval.plan import Plan
from eval.provenance import checkpoint_identity
from eval.quality import Work, answer, pending
from eval.recorder import Recorder
from eval.results import Build
from eval.timing import Timer, untimed
from eval.workers import answered_by_processes, answered_here


@dataclass
class _Todo:
    """What is left of a plan."""

    questions: int = 0
    timings: list[tuple[str, str, Encoded]] = field(default_factory=list)  # data set, item, prompt
    documents: dict[str, list[npt.NDArray[np.int32]]] = field(default_factory=dict)  # by data set

    def add(self, dataset: str, prompt: Encoded) -> None:
        """Note the documents of a prompt."""
        self.documents.setdefault(dataset, []).extend(prompt.documents)


def run(plan: Plan, recorder: Recorder) -> None:
    """Do what is left; RedKnotError, or an interrupt, leaves whole records from which the next run goes on."""
    todo = _left(plan, recorder)
    checkpoint = checkpoint_identity(plan.opening.checkpoint).digest
    with ExitStack() as opened:
        engine: ArmEngine | None = None
        if todo.timings or (todo.questions and plan.workers == 1):
            engine = opened.enter_context(closing(plan.opening.open()))
            recorder.served_by(engine.versions)
        _build(plan, todo, recorder)
        if todo.questions:
            work = _work(plan, recorder)
            if plan.workers == 1 and engine is not None:
                answers = answered_here(engine, plan.opening.arms, checkpoint)
            else:
                answers = answered_by_processes(plan.opening, checkpoint, plan.workers)
            answer(work, todo.questions, answers, recorder)
        if engine is not None:
            Timer(engine, plan.opening.arms, checkpoint, plan.pairs, recorder).time(todo.timings)


def _work(plan: Plan, recorder: Recorder) -> Iterator[Work]:
    """The questions that are left. Read as they are asked: what is answered meanwhile is not asked again."""
    items = chain.from_iterable(plan.items(dataset) for dataset in plan.quality)
    return pending(items, plan.encoder, plan.arms, recorder)


def _left(plan: Plan, recorder: Recorder) -> _Todo:
    todo = _Todo()
    for item, question in _work(plan, recorder):
        todo.questions += 1
        todo.add(item.dataset, question.prompt)
    for dataset in plan.timing:
        for item in plan.timed(dataset):
            if untimed(recorder, dataset.name, item.id, plan.opening.arms, plan.pairs):
                prompt = plan.encoder.encode(item)
                todo.timings.append((dataset.name, item.id, prompt))
                todo.add(dataset.name, prompt)
    return todo


def _build(plan: Plan, todo: _Todo, recorder: Recorder) -> None:
    builder = Builder(plan.opening.checkpoint, plan.opening.store, plan.targets)
    for dataset, documents in todo.documents.items():
        built = builder.build(dataset, documents)
        if built.documents:
            recorder.add(
                Build(
                    run=recorder.run.run,
                    dataset=dataset,
                    documents=built.documents,
                    tokens=built.tokens,
                    found=built.found,
                    seconds=built.seconds,
                    bytes=built.nbytes,
                )
            )
