"""What an evaluation is to do: data sets, arms, counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from eval.artifacts import targets
from eval.encoder import Encoder
from eval.items import DataSet, Item
from eval.names import NO_DOCUMENTS
from eval.timing import Pairs
from eval.workers import Opening
from redknot.build.target import Target
from redknot.model.geometry import load_geometry


@dataclass(frozen=True)
class Plan:
    """What is to be done."""

    opening: Opening
    encoder: Encoder
    quality: tuple[DataSet, ...]
    timing: tuple[DataSet, ...]
    pairs: Pairs
    limit: int | None = None  # items of each data set
    timed_items: int | None = None  # of each data set that is timed
    workers: int = 1

    @property
    def arms(self) -> tuple[str, ...]:
        """Those that answer: the profiles, and recompute without the documents."""
        return (*self.opening.arms, NO_DOCUMENTS)

    def items(self, dataset: DataSet) -> Iterator[Item]:
        """The items to be answered."""
        return islice(dataset.items(), self.limit)

    def timed(self, dataset: DataSet) -> Iterator[Item]:
        """The items to be timed: those with documents, from the first on."""
        found = (item for item in dataset.items() if any(is_document for _, is_document in item.parts))
        return islice(found, self.timed_items)

    @property
    def targets(self) -> list[Target]:
        """The kinds of artifacts that the arms need; ConfigError for an arm that does not fit the model."""
        geometry = load_geometry(self.opening.checkpoint)
        return targets(geometry, [arm.profile for arm in self.opening.arms.values()], self.opening.tp)
