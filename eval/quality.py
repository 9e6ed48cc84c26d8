"""Quality: every item of a data set through every arm, with identical ids and cap, into the results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from eval.answering import Outcome, Question
from eval.encoder import Encoder
from eval.items import Item
from eval.names import NO_DOCUMENTS
from eval.progress import progress
from eval.recorder import Recorder
from eval.results import Answer, Rejected
from eval.workers import Answering
from redknot.errors import ConfigError

Work = tuple[Item, Question]


def pending(items: Iterable[Item], encoder: Encoder, arms: Sequence[str], recorder: Recorder) -> Iterator[Work]:
    """What no earlier run has answered, of one data set or several behind each other.

    ConfigError where an item is not the one that was answered under its name.
    """
    for dataset, group in groupby(items, key=lambda item: item.dataset):
        done = recorder.answered(dataset)
        prompts = {one.item: one.prompt_sha256 for one in recorder.answers(dataset) if one.arm != NO_DOCUMENTS}
        for item in group:
            asked = _question(item, encoder, [arm for arm in arms if (item.id, arm) not in done])
            if prompts.get(item.id, asked.prompt.sha256) != asked.prompt.sha256:
                raise ConfigError(f"{recorder.path}: {dataset} {item.id} was another prompt then; give another --out")
            if asked.arms:
                yield item, asked


def _question(item: Item, encoder: Encoder, arms: Sequence[str]) -> Question:
    prompt = encoder.encode(item)
    alone = encoder.question(item) if prompt.spans and NO_DOCUMENTS in arms else None
    if alone is None or not len(alone):
        alone, arms = None, [arm for arm in arms if arm != NO_DOCUMENTS]
    return Question(item.dataset, item.id, prompt, alone, item.max_new_tokens, tuple(arms))


def answer(work: Iterable[Work], total: int, answering: Answering, recorder: Recorder) -> None:
    """Ask all that is pending, clusters whole; answers of an item are recorded together, by this process alone."""
    asking: dict[tuple[str, str], Item] = {}

    def clusters() -> Iterator[list[Question]]:
        for _, group in groupby(work, key=lambda pair: (pair[0].dataset, pair[0].cluster)):
            cluster = list(group)
            asking.update({(item.dataset, item.id): item for item, _ in cluster})
            yield [asked for _, asked in cluster]

    with progress(total, "question", "answers") as bar:
        for cluster, outcomes in answering(clusters()):
            for asked, of_item in zip(cluster, outcomes, strict=True):
                item = asking.pop((asked.dataset, asked.item))
                for outcome in of_item:
                    recorder.add(_record(recorder.run.run, item, outcome))
                bar.update()


def _record(run: str, item: Item, outcome: Outcome) -> Answer | Rejected:
    if outcome.rejected is not None:
        return Rejected(run=run, dataset=item.dataset, item=item.id, arm=outcome.arm, reason=outcome.rejected)
    text = item.answer(outcome.text)
    return Answer(
        run=run,
        dataset=item.dataset,
        item=item.id,
        cluster=item.cluster,
        arm=outcome.arm,
        prompt_tokens=outcome.prompt_tokens,
        prompt_sha256=outcome.prompt_sha256,
        max_new_tokens=item.max_new_tokens,
        cut=item.cut,
        text=text,
        references=item.references,
        score=item.score(text),
        kl=outcome.kl,
        top1=outcome.top1,
        report=outcome.report,
        group=item.group,
    )
