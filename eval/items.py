"""Items: one question of a data set with everything the harness needs of it, whatever benchmark it is from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """One question. Items of a cluster share their context, and come one behind the other."""

    dataset: str
    id: str  # unique within the data set
    cluster: str
    parts: tuple[tuple[str, bool], ...]  # texts that are tokenised one by one, and whether each is a document
    references: tuple[str, ...]
    max_new_tokens: int
    score: Callable[[str], float]  # of an answer, 0 to 1
    group: str = ""  # LongBench-E's bucket
    cut: bool = False  # the middle of the context was cut out to fit
    stop_at_newline: bool = False
    chat: bool = False  # a chat model gets its chat template around the prompt

    def answer(self, text: str) -> str:
        """What counts of a generated text: all of it, or what stands in front of a line break that is not its start."""
        end = text.find("\n", 1) if self.stop_at_newline else -1
        return text if end < 0 else text[:end]


@dataclass(frozen=True)
class DataSet:
    """The items of a data set, read or drawn anew each time they are asked for: they may not fit memory all at once."""

    name: str
    items: Callable[[], Iterator[Item]]
