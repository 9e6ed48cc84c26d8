"""A trace of requests against a cache of token blocks, recorded from a seed: who comes with what, grows, forks, ends.

A prompt is a preamble, one to three documents (popular ones more often) and a question of its own, or it continues a
conversation that ended: all that was said before and a new question. Answers grow by whole blocks, some requests are
forked into several answers. Blocks are known by what they hold *and* what precedes them, which is all that prefix
caches can reuse; the store could reuse a document behind another preamble, too, but then the sides would do different
work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash

VOCABULARY = 129280
ARRIVE, GROW, FORK, FINISH = range(4)


class Event(NamedTuple):
    """``blocks``: of the prompt (ARRIVE) or one that became full (GROW); ``other``: the new request of a FORK."""

    kind: int
    request: int
    blocks: tuple[int, ...] = ()
    other: int = -1


@dataclass
class Trace:
    """Events, and for every block: the key (a chain over what precedes it) and the tokens (int32) as bytes."""

    block_tokens: int
    events: list[Event] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)

    @property
    def operations(self) -> int:
        """What any side is asked to do, however it does it.

        Of each full block of a prompt: look for it, and refer to it or take and register one. Of each answer: take its
        open block. Of each full block of an answer: register it, take the next. Of each block of a fork or of an end:
        one reference more or less.
        """
        held: dict[int, int] = {}  # full blocks of live requests
        count = 0
        for event in self.events:
            if event.kind == ARRIVE:
                held[event.request] = len(event.blocks)
                count += 2 * len(event.blocks) + 1
            elif event.kind == GROW:
                held[event.request] += 1
                count += 2
            elif event.kind == FORK:
                held[event.other] = held[event.request]
                count += held[event.request] + 1
            else:
                count += held.pop(event.request) + 1
        return count


@dataclass
class _Live:
    request: int
    blocks: list[int]
    grows: int  # full blocks of answer that will still be written
    forks: int
    room: int  # blocks it may hold at the end


class _Recorder:
    def __init__(self, capacity: int, requests: int, seed: int, block_tokens: int) -> None:
        self.trace = Trace(block_tokens)
        self._rng = np.random.default_rng(seed)
        self._room = int(0.9 * capacity)  # of blocks that live requests may hold together, were nothing shared
        self._requests = requests
        self._numbers = iter(range(1 << 30))
        self._chain: dict[tuple[int, bytes], int] = {}
        self._live: list[_Live] = []
        self._ended: list[list[int]] = []
        self._preambles = [self._text(1, 9) for _ in range(6)]
        self._documents = [self._text(6, 33) for _ in range(64)]
        self._popular = 1 / np.arange(1, 65)
        self._popular /= self._popular.sum()

    def record(self) -> Trace:
        waiting = (self._prompt() for _ in range(self._requests))
        following = next(waiting, None)
        while following is not None or self._live:
            room = self._room - sum(live.room for live in self._live)
            if following is not None and following.room <= room:
                self.trace.events.append(Event(ARRIVE, following.request, tuple(following.blocks)))
                self._live.append(following)
                following = next(waiting, None)
            else:
                self._step(self._live[self._rng.integers(len(self._live))])
        return self.trace

    def _step(self, live: _Live) -> None:
        """One event of a request that runs."""
        events = self.trace.events
        if live.forks:
            live.forks -= 1
            grows = int(self._rng.integers(0, 5))
            child = _Live(next(self._numbers), list(live.blocks), grows, 0, len(live.blocks) + grows + 1)
            events.append(Event(FORK, live.request, other=child.request))
            self._live.append(child)
            live.room -= child.room
        elif live.grows:
            live.grows -= 1
            block = self._follow(live.blocks, self._text(1, 2))[0]
            live.blocks.append(block)
            events.append(Event(GROW, live.request, (block,)))
        else:
            events.append(Event(FINISH, live.request))
            self._live.remove(live)
            self._ended = [*self._ended[-31:], live.blocks]

    def _prompt(self) -> _Live:
        rng = self._rng
        if self._ended and rng.random() < 0.3:
            blocks = list(self._ended[rng.integers(len(self._ended))])
        else:
            blocks = self._follow([], self._preambles[rng.integers(len(self._preambles))])
            for number in rng.choice(64, rng.integers(1, 4), replace=False, p=self._popular):
                blocks += self._follow(blocks, self._documents[number])
        blocks += self._follow(blocks, self._text(1, 4))
        grows, forks = int(rng.integers(0, 5)), int(rng.random() < 0.1) * int(rng.integers(1, 4))
        room = len(blocks) + grows + 1
        return _Live(next(self._numbers), blocks, grows, forks, room + forks * (room + 5))

    def _follow(self, before: list[int], texts: list[bytes]) -> list[int]:
        """The blocks of some texts behind others."""
        found = []
        last = before[-1] if before else -1
        for text in texts:
            last = self._chain.setdefault((last, text), len(self.trace.keys))
            if last == len(self.trace.keys):
                previous = self.trace.keys[(found or before)[-1]] if found or before else b""
                self.trace.keys.append(xxhash.xxh3_128_digest(previous + text))
                self.trace.tokens.append(text)
            found.append(last)
        return found

    def _text(self, low: int, high: int) -> list[bytes]:
        """From ``low`` to ``high - 1`` blocks of tokens."""
        shape = (int(self._rng.integers(low, high)), self.trace.block_tokens)
        return [row.tobytes() for row in self._rng.integers(0, VOCABULARY, shape, dtype=np.int32)]


def record(capacity: int, requests: int, seed: int, block_tokens: int = 128) -> Trace:
    """A trace for a pool of ``capacity`` blocks, which live requests nearly fill, and all contents overfill."""
    return _Recorder(capacity, requests, seed, block_tokens).record()
