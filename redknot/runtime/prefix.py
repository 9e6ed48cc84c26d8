"""An exact prefix cache: pages of earlier requests, found by their token ids from position 0 on.

A page is known by its tokens and by the page in front of it, which are compared as they are, not by a hash. When the
latent store has no room left, the page that was used longest ago goes first; nothing of the cache ever fails a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from torch import Tensor

from redknot.latents.books import Counters
from redknot.latents.handles import PoolFullError
from redknot.latents.pages import Pages
from redknot.latents.session import Session
from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace

_Key = tuple[int, bytes]  # number of the page in front, ids of the page's own tokens
_FIRST = 0  # in front of the first page


class PrefixCache:
    """The prefixes that one engine knows, in one namespace. One thread at a time uses it."""

    def __init__(self, space: LatentSpace, namespace: str) -> None:
        self.counters = Counters(("found", "kept", "evicted"))  # pages
        self._pages = Pages(space, namespace)
        self._store = space.store
        self._size = space.geometry.block_length
        # By key, least recently used first, and so a page before the one in front of it: what goes is always a leaf.
        self._numbers: dict[_Key, int] = {}
        self._next = count(_FIRST + 1)

    def __len__(self) -> int:
        return len(self._numbers)

    def begin(self, memory: Workspace, token_ids: Tensor, capacity: int) -> Session:
        """A session that holds the longest known prefix of ``token_ids`` [n], never its last row, whose logits count.

        It has room for ``capacity`` tokens. PoolFullError or ArenaFullError where an empty cache would not help.
        """
        path = self._path(token_ids[:-1])
        self._touch(path)
        blocks = -(-capacity // self._size)
        while self._numbers and blocks - len(path) > self._store.room():
            if path[-1:] == [self._evict()]:
                path.pop()
        session = self._pages.begin(memory, [self._numbers[key] for key in path], capacity)
        self.counters["found"] += len(path)
        return session

    def keep(self, session: Session, token_ids: Tensor) -> None:
        """Keep the pages that a prefill of ``token_ids`` [n] left in its session, as far as there is room."""
        path = self._path(token_ids)
        self._touch(path)
        for end in range((len(path) + 1) * self._size, len(token_ids) + 1, self._size):
            number = next(self._next)
            if not self._kept(number, session, end, path):
                break
            path.append((self._numbers[path[-1]] if path else _FIRST, self._tokens(token_ids, end)))
            self._numbers[path[-1]] = number
        session.boundaries = ()
        session.boundary_tails.clear()
        self._touch(path)

    def clear(self) -> None:
        """Give up everything."""
        self._pages.clear()
        self._numbers.clear()

    def _path(self, token_ids: Tensor) -> list[_Key]:
        """The known pages with which these ids begin."""
        path: list[_Key] = []
        before = _FIRST
        for end in range(self._size, len(token_ids) + 1, self._size):
            key = (before, self._tokens(token_ids, end))
            if key not in self._numbers:
                break
            path.append(key)
            before = self._numbers[key]
        return path

    def _tokens(self, token_ids: Tensor, end: int) -> bytes:
        return token_ids[end - self._size : end].numpy().tobytes()

    def _touch(self, path: Sequence[_Key]) -> None:
        for key in reversed(path):
            self._numbers[key] = self._numbers.pop(key)

    def _evict(self) -> _Key:
        """Give up the page that was used longest ago."""
        key = next(iter(self._numbers))
        self._pages.free((self._numbers.pop(key),))
        self.counters["evicted"] += 1
        return key

    def _kept(self, number: int, session: Session, end: int, path: Sequence[_Key]) -> bool:
        """Keep one page behind those of ``path``, in the place of pages of others if need be."""
        while True:
            try:
                self._pages.keep(number, session, end)
            except PoolFullError:
                if next(iter(self._numbers), None) in (None, *path):
                    return False
                self._evict()
            else:
                self.counters["kept"] += 1
                return True
