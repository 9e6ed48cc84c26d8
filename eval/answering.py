"""One question through all arms: what a worker does, with nothing but ids in and plain values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.arms import Arm
from eval.encoded import Encoded
from eval.engines.base import ArmEngine, Reply
from eval.guard import objection, slim
from eval.logits import divergence, same_first
from eval.names import NO_DOCUMENTS, RECOMPUTE


@dataclass(frozen=True)
class Question:
    """One item, ready to be asked."""

    dataset: str
    item: str
    prompt: Encoded
    alone: Encoded | None  # without its documents; None where it has none
    max_new_tokens: int
    arms: tuple[str, ...]  # those that have not answered yet


@dataclass(frozen=True)
class Outcome:
    """What one arm made of a question; ``rejected`` says why it does not count."""

    arm: str
    prompt_tokens: int
    prompt_sha256: str
    text: str
    report: dict[str, Any]  # slim
    rejected: str | None = None
    kl: float | None = None
    top1: bool | None = None


def ask(engine: ArmEngine, arms: Mapping[str, Arm], question: Question, checkpoint: str) -> list[Outcome]:
    """Ask every arm that is missing; recompute answers in any case where logits are compared with its own."""
    outcomes: list[Outcome] = []
    reference: Reply | None = None
    for name in dict.fromkeys((RECOMPUTE, *question.arms)):
        prompt, ran = (question.alone, RECOMPUTE) if name == NO_DOCUMENTS else (question.prompt, name)
        assert prompt is not None  # who asks for no-documents has it
        reply = engine.answer(ran, prompt, question.max_new_tokens)
        rejected = objection(reply, prompt, question.max_new_tokens, checkpoint, arms[ran].profile)
        if name == RECOMPUTE and rejected is None:
            reference = reply
        if name in question.arms:
            outcomes.append(_outcome(name, prompt, reply, rejected, None if name == RECOMPUTE else reference))
    return outcomes


def _outcome(name: str, prompt: Encoded, reply: Reply, rejected: str | None, reference: Reply | None) -> Outcome:
    kl = top1 = None
    if reference is not None and reference.logits is not None and reply.logits is not None and name != NO_DOCUMENTS:
        kl, top1 = divergence(reference.logits, reply.logits), same_first(reference.logits, reply.logits)
    return Outcome(name, len(prompt), prompt.sha256, reply.text, slim(reply.report), rejected, kl, top1)


def ask_all(
    engine: ArmEngine, arms: Mapping[str, Arm], questions: Sequence[Question], checkpoint: str
) -> list[list[Outcome]]:
    """The questions of a cluster, in order: their documents are read once."""
    return [ask(engine, arms, question, checkpoint) for question in questions]
