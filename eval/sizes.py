"""What a run would do, without doing any of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.items import DataSet
from eval.plan import Plan
from redknot.build.target import Target


@dataclass(frozen=True)
class Size:
    """What a data set comes to."""

    dataset: str
    what: str  # "answers" or "timing"
    items: int
    tokens: int  # of all prompts
    longest: int  # tokens of a prompt
    cut: int  # items
    documents: int  # distinct ones
    document_tokens: int
    nbytes: int  # of their artifacts
    requests: int


def sizes(plan: Plan) -> list[Size]:
    """What a run from nothing would do."""
    wanted = plan.targets
    found = [_size(plan, wanted, dataset, "answers") for dataset in plan.quality]
    return found + [_size(plan, wanted, dataset, "timing") for dataset in plan.timing]


def _size(plan: Plan, wanted: Sequence[Target], dataset: DataSet, what: str) -> Size:
    items = list(plan.items(dataset) if what == "answers" else plan.timed(dataset))
    prompts = [plan.encoder.encode(item) for item in items]
    lengths = list({ids.tobytes(): len(ids) for prompt in prompts for ids in prompt.documents}.values())
    if what == "answers":
        requests = sum(len(plan.arms) if prompt.spans else len(plan.opening.arms) for prompt in prompts)
    else:
        requests = 2 * len(plan.pairs.turns) * (len(plan.opening.arms) - 1) * len(items)
    return Size(
        dataset=dataset.name,
        what=what,
        items=len(items),
        tokens=sum(map(len, prompts)),
        longest=max(map(len, prompts), default=0),
        cut=sum(item.cut for item in items),
        documents=len(lengths),
        document_tokens=sum(lengths),
        nbytes=sum(target.nbytes(length) for target in wanted for length in lengths),
        requests=requests,
    )
