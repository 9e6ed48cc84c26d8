"""The block manager of nano-vllm's design, written anew as a baseline: prefix-chained hashes, a queue of free blocks.

A block that nobody refers to joins the end of the queue and keeps its content; who needs a new one takes the head, and
what that held is forgotten. A prompt shares blocks from its start up to the first that is not known. Against the
published design this one is spared the set of used block numbers (the count of references says the same) and turning
token lists into arrays (it gets the bytes). It has no locks, no check of who refers to what, and one table for each
request instead of handles. Forks are not in the original: a table is copied, and every block gets one reference more.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import xxhash


class Queue(Protocol):
    """Free blocks, those freed first in front."""

    def popleft(self) -> int: ...
    def append(self, number: int) -> None: ...
    def remove(self, number: int) -> None: ...


class LinkedQueue(OrderedDict[int, None]):
    """A queue that finds the block to remove at once; the deque of the original searches for it from its head."""

    def __init__(self, numbers: Iterable[int]) -> None:
        super().__init__(dict.fromkeys(numbers))

    def popleft(self) -> int:
        return self.popitem(last=False)[0]

    def append(self, number: int) -> None:
        self[number] = None

    remove = OrderedDict.__delitem__


class Block:
    __slots__ = ("key", "refs", "tokens")

    def __init__(self) -> None:
        self.key: object = None
        self.tokens: bytes | None = None
        self.refs = 0


class BlockManager:
    """Tables are lists of block numbers, the open block last. Here callers bring the keys of full blocks."""

    def __init__(self, blocks: int, queue: Callable[[Iterable[int]], Queue] = deque) -> None:
        self.hits = 0
        self._blocks = [Block() for _ in range(blocks)]
        self._free = queue(range(blocks))
        self._by_key: dict[object, int] = {}

    def seat(self, keys: Sequence[bytes]) -> list[int]:
        """The table of a prompt of full blocks, and an open one."""
        table = []
        known = True
        for key in keys:
            number = self._by_key.get(key) if known else None
            if number is None:
                known = False
                number = self._take()
                self._register(number, key, None)
            else:
                self._share(number)
            table.append(number)
        table.append(self._take())
        return table

    def grow(self, table: list[int], key: bytes) -> None:
        """The open block is full."""
        self._register(table[-1], key, None)
        table.append(self._take())

    def fork(self, table: list[int]) -> list[int]:
        """Another table over the same full blocks."""
        shared = table[:-1]
        for number in shared:
            self._blocks[number].refs += 1
        shared.append(self._take())
        return shared

    def release(self, table: list[int]) -> None:
        """Give up a table; what came last in it is forgotten first."""
        for number in reversed(table):
            block = self._blocks[number]
            block.refs -= 1
            if not block.refs:
                self._free.append(number)

    def _take(self) -> int:
        number = self._free.popleft()
        block = self._blocks[number]
        if block.key is not None:
            if self._by_key.get(block.key) == number:
                del self._by_key[block.key]
            block.key = block.tokens = None
        block.refs = 1
        return number

    def _share(self, number: int) -> None:
        block = self._blocks[number]
        if not block.refs:
            self._free.remove(number)
        block.refs += 1
        self.hits += 1

    def _register(self, number: int, key: object, tokens: bytes | None) -> None:
        block = self._blocks[number]
        block.key, block.tokens = key, tokens
        self._by_key[key] = number


class HashingBlockManager(BlockManager):
    """Callers bring the tokens of full blocks, whose keys are chained hashes; tokens are compared on every match."""

    def seat(self, keys: Sequence[bytes]) -> list[int]:
        table = []
        known = True
        chain = 0
        for tokens in keys:
            chain = _chained(chain, tokens)
            number = self._by_key.get(chain) if known else None
            if number is None or self._blocks[number].tokens != tokens:
                known = False
                number = self._take()
                self._register(number, chain, tokens)
            else:
                self._share(number)
            table.append(number)
        table.append(self._take())
        return table

    def grow(self, table: list[int], key: bytes) -> None:
        before = self._blocks[table[-2]].key if len(table) > 1 else 0
        assert isinstance(before, int)
        self._register(table[-1], _chained(before, key), key)
        table.append(self._take())


def _chained(before: int, tokens: bytes) -> int:
    return xxhash.xxh64_intdigest(before.to_bytes(8, "little") + tokens)
