"""What two arms wrote where they differ: a few questions, those where most was lost in front."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from eval.names import NO_DOCUMENTS, RECOMPUTE
from eval.report.blocks import Block, Fold, Heading, Paragraph, SideBySide
from eval.report.sections import Section
from eval.results import Answer

SAMPLES = 5  # of an arm on a data set
_LONGEST = 400  # characters shown of one text
_REFERENCES = 3

Answers = Mapping[Hashable, Answer]


def texts_part(section: Section) -> list[Block]:
    """The blocks; none where every arm wrote what recompute did."""
    found: dict[str, dict[str, dict[Hashable, Answer]]] = {}
    for answer in section.answers:
        found.setdefault(answer.arm, {}).setdefault(answer.dataset, {})[section.item(answer)] = answer
    base = found.pop(RECOMPUTE, {})
    out: list[Block] = []
    for arm in section.arms:
        for dataset, answers in sorted(found.get(arm, {}).items()) if arm != NO_DOCUMENTS else ():
            both = {key: answer for key, answer in answers.items() if key in base.get(dataset, {})}
            if differing := _differing(base.get(dataset, {}), both):
                title = f"{arm} on {dataset}: {len(differing)} of {len(both)} texts differ from recompute's"
                pairs = [_side_by_side(base[dataset][key], answers[key]) for key in differing[:SAMPLES]]
                out.append(Fold(title, tuple(pairs)))
    if not out:
        return []
    text = f"At most {SAMPLES} for each arm and data set; those where the arm loses most against recompute come first."
    return [Heading("Texts side by side"), Paragraph(text), *out]


def _differing(base: Answers, answers: Answers) -> list[Hashable]:
    """Items with another text than recompute's, by how much score they lost, then by name."""
    keys = [key for key, answer in answers.items() if answer.text != base[key].text]
    return sorted(keys, key=lambda key: (answers[key].score - base[key].score, answers[key].item))


def _side_by_side(base: Answer, answer: Answer) -> SideBySide:
    wanted = " | ".join(_cut(text, 120) for text in base.references[:_REFERENCES])
    more = f" | and {len(base.references) - _REFERENCES} more" if len(base.references) > _REFERENCES else ""
    return SideBySide(
        f"{_cut(answer.item, 80)}, expected: {wanted}{more}",
        (f"{base.arm}, score {100 * base.score:.0f}", _cut(base.text, _LONGEST)),
        (f"{answer.arm}, score {100 * answer.score:.0f}", _cut(answer.text, _LONGEST)),
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"
