"""Prometheus metrics by name: all begin with ``redknot_``, and where there are ranks, all have the label ``tp_rank``.

Where ``PROMETHEUS_MULTIPROC_DIR`` is set, counts of all processes lie in one folder and are summed by name and labels:
without the rank, every request would count once for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

RANK = "tp_rank"
_Metric = TypeVar("_Metric", bound=MetricWrapperBase)


@dataclass(frozen=True)
class Family(Generic[_Metric]):
    """One name; ``rank`` are the values of the labels that are the same in the whole process."""

    metric: _Metric
    rank: tuple[str, ...]

    def labels(self, *values: str) -> _Metric:
        """The metric with these label values."""
        found = (*values, *self.rank)
        return self.metric.labels(*found) if found else self.metric


class Families:
    """Makes the metrics of one process in a registry."""

    def __init__(self, registry: CollectorRegistry, rank: int | None = None) -> None:
        self._registry = registry
        self._rank = () if rank is None else (str(rank),)
        self._label = () if rank is None else (RANK,)

    def counter(self, name: str, meaning: str, *labels: str) -> Family[Counter]:
        """A count that never falls."""
        names = (*labels, *self._label)
        return Family(Counter(f"redknot_{name}", meaning, names, registry=self._registry), self._rank)

    def gauge(self, name: str, meaning: str, *labels: str) -> Family[Gauge]:
        """A value of now; of several processes with the same labels the one that spoke last counts."""
        made = Gauge(
            f"redknot_{name}",
            meaning,
            (*labels, *self._label),
            registry=self._registry,
            multiprocess_mode="livemostrecent",
        )
        return Family(made, self._rank)

    def histogram(self, name: str, meaning: str, buckets: Sequence[float], *labels: str) -> Family[Histogram]:
        """A distribution of seconds."""
        names = (*labels, *self._label)
        made = Histogram(f"redknot_{name}", meaning, names, registry=self._registry, buckets=buckets)
        return Family(made, self._rank)
