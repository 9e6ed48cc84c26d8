"""Which block leaves a tier first. A policy knows keys and costs; it moves nothing.

A tier tells its policy when a block could be evicted, when it no longer could (it is in use, pinned or gone), and when
it was. Blocks have equal sizes, so that cost per byte orders them as cost does.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class Eviction(Protocol[K]):
    """What a tier asks of a policy; no method takes longer than the logarithm of the number of keys."""

    def add(self, key: K, cost: float, /) -> object:
        """``key``, not in the policy, may be evicted from now on; computing it again would cost ``cost``."""

    def discard(self, key: K, /) -> object:
        """``key``, in the policy, may not be evicted any more."""

    def evicted(self, key: K, /) -> None:
        """``key``, in the policy, was evicted."""

    def victim(self) -> K | None:
        """The key to evict next, which stays; None when there is none."""

    def evict(self, count: int, /) -> list[K]:
        """Take out so many keys (there are as many) in the order in which they leave."""

    def __len__(self) -> int:
        """How many keys there are."""

    def __iter__(self) -> Iterator[K]:
        """Every key, in no particular order."""


class Lru(Generic[K]):
    """The key that was added longest ago leaves first; cost does not matter."""

    def __init__(self) -> None:
        self._keys: OrderedDict[K, float] = OrderedDict()
        # On the fast path of a store: no call of Python's lies between it and the dictionary. See ``Eviction``.
        self.add: Callable[[K, float], object] = self._keys.setdefault
        self.discard: Callable[[K], object] = self._keys.__delitem__

    def evicted(self, key: K, /) -> None:
        """See ``Eviction``."""
        del self._keys[key]

    def victim(self) -> K | None:
        """See ``Eviction``."""
        return next(iter(self._keys), None)

    def evict(self, count: int, /) -> list[K]:
        """See ``Eviction``."""
        pop = self._keys.popitem
        return [pop(False)[0] for _ in range(count)]

    def __len__(self) -> int:
        """See ``Eviction``."""
        return len(self._keys)

    def __iter__(self) -> Iterator[K]:
        """Oldest first."""
        return iter(self._keys)


class GreedyDual(Generic[K]):
    """GreedyDual-Size: a key is worth its cost plus an inflation that grows with every eviction.

    A key that was cheap to compute leaves before a dear one of the same age, and a dear one that nobody asks for
    leaves after enough cheap ones did.
    """

    def __init__(self) -> None:
        self._inflation = 0.0
        self._added = 0
        self._entries: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []  # also holds entries of keys that left; the dict tells which

    def add(self, key: K, cost: float, /) -> None:
        """See ``Eviction``."""
        self._added += 1
        entry = (self._inflation + cost, self._added)
        self._entries[key] = entry
        if len(self._heap) > 2 * len(self._entries) + 8:
            self._heap = [(*entry, key) for key, entry in self._entries.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (*entry, key))

    def discard(self, key: K, /) -> None:
        """See ``Eviction``."""
        del self._entries[key]

    def evicted(self, key: K, /) -> None:
        """See ``Eviction``."""
        self._inflation = max(self._inflation, self._entries.pop(key)[0])

    def victim(self) -> K | None:
        """See ``Eviction``."""
        while self._heap:
            worth, number, key = self._heap[0]
            if self._entries.get(key) == (worth, number):
                return key
            heapq.heappop(self._heap)
        return None

    def evict(self, count: int, /) -> list[K]:
        """See ``Eviction``."""
        found: list[K] = []
        while len(found) < count and (key := self.victim()) is not None:
            self.evicted(key)
            found.append(key)
        return found

    def __len__(self) -> int:
        """See ``Eviction``."""
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        """In the order they were added."""
        return iter(self._entries)


POLICIES: dict[str, Callable[[], Eviction[Any]]] = {"lru": Lru, "cost": GreedyDual}
