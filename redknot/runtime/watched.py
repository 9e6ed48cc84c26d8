"""Counts and levels that are kept elsewhere, by the code that does the work, and published as metrics.

A scrape of the registry publishes first. Where another process answers the scrapes, someone has to publish.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric
from prometheus_client.registry import Collector

from redknot.latents.books import Book
from redknot.runtime.families import Families, Family

_STATES = ("free", "live", "quarantined")


class Watched:
    """Sources of counts, levels and books; what has one name is summed. Safe to use from threads."""

    def __init__(self, families: Families) -> None:
        self._families = families
        self._lock = threading.Lock()
        self._sources: list[tuple[str, Callable[[], Mapping[str, int]]]] = []  # prefix, counts
        self._counters: dict[str, Family[Counter]] = {}
        self._published: dict[str, int] = {}
        self._levels: list[tuple[str, Callable[[], float]]] = []
        self._gauges: dict[str, Family[Gauge]] = {}
        self._books: list[Callable[[], Mapping[str, Book]]] = []
        meaning = "Bytes of latents; free, live and quarantined ones add up to the tier's budget."
        self._bytes = families.gauge("latents_bytes", meaning, "tier", "state")

    def add_counts(self, prefix: str, counts: Callable[[], Mapping[str, int]]) -> None:
        """Counts that never fall, by name."""
        with self._lock:
            self._sources.append((prefix, counts))
        self.publish()

    def add_level(self, name: str, meaning: str, level: Callable[[], float]) -> None:
        """A value of now."""
        with self._lock:
            if name not in self._gauges:
                self._gauges[name] = self._families.gauge(name, meaning)
            self._levels.append((name, level))
        self.publish()

    def add_books(self, books: Callable[[], Mapping[str, Book]]) -> None:
        """The bytes of a latent store, by tier."""
        with self._lock:
            self._books.append(books)
        self.publish()

    def publish(self) -> None:
        """Bring the metrics up to date."""
        with self._lock:
            self._publish_counts()
            self._publish_levels()
            self._publish_bytes()

    def _publish_counts(self) -> None:
        sums: dict[str, int] = {}
        for prefix, counts in self._sources:
            for name, count in counts().items():
                sums[f"{prefix}_{name}"] = sums.get(f"{prefix}_{name}", 0) + count
        for name, count in sums.items():
            if name not in self._counters:
                meaning = f"{name.replace('_', ' ').capitalize()}."
                self._counters[name] = self._families.counter(name, meaning)
                self._counters[name].labels()  # shown from now on, also at 0
            grown = count - self._published.get(name, 0)
            if grown > 0:
                self._counters[name].labels().inc(grown)
                self._published[name] = count

    def _publish_levels(self) -> None:
        sums: dict[str, float] = {}
        for name, level in self._levels:
            sums[name] = sums.get(name, 0) + level()
        for name, value in sums.items():
            self._gauges[name].labels().set(value)

    def _publish_bytes(self) -> None:
        sums: dict[tuple[str, str], int] = {}
        for books in self._books:
            for tier, book in books().items():
                for state in _STATES:
                    sums[tier, state] = sums.get((tier, state), 0) + int(getattr(book, state))
        for labels, nbytes in sums.items():
            self._bytes.labels(*labels).set(nbytes)


class PublishFirst(Collector):
    """Stands in front of the metrics of a registry, so that a scrape finds them up to date."""

    def __init__(self, registry: CollectorRegistry, publish: Callable[[], None]) -> None:
        self._publish = publish
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """Nothing."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Publish; the metrics are collected for themselves."""
        self._publish()
        return iter(())


class Publisher:
    """Publishes every ``seconds`` on a thread of its own, as long as the process lives or until it is closed."""

    def __init__(self, publish: Callable[[], None], seconds: float = 1.0) -> None:
        self._publish = publish
        self._seconds = seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redknot-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish once more, and end."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._seconds):
            self._publish()
        self._publish()
