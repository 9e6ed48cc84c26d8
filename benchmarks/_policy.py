"""The policy comparison: each side replays the trace on a fresh instance, its arguments made ready before."""

from __future__ import annotations

import statistics
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from benchmarks import _radix
from benchmarks._nano_vllm import BlockManager, HashingBlockManager, LinkedQueue
from benchmarks._paired import in_turns, timed
from benchmarks._trace import ARRIVE, FORK, GROW, Trace, record
from eval.statistics import ratio
from redknot.latents.content import Name, caller_name
from redknot.latents.handles import Run
from redknot.latents.settings import StoreConfig
from redknot.latents.store import LatentStore

NAMESPACE = "policy"
_PAYLOAD = 8  # bytes a block; the least that a store takes, for no payload is written or read here


class Side(Protocol):
    """Who replays; ``blocks`` are what the side was promised for them."""

    hits: int

    def arrive(self, request: int, blocks: Any) -> None: ...
    def grow(self, request: int, block: Any) -> None: ...
    def fork(self, request: int, other: int) -> None: ...
    def finish(self, request: int, _: object) -> None: ...


class StoreSide:
    """The latent store; of each block its name."""

    def __init__(self, blocks: int) -> None:
        self.store = LatentStore(StoreConfig(b"policy", _PAYLOAD, blocks * _PAYLOAD))
        self._runs: dict[int, tuple[Run, int]] = {}  # and how many blocks of it are full

    @property
    def hits(self) -> int:
        return self.store.counters()["hits"]

    def arrive(self, request: int, blocks: Sequence[Name]) -> None:
        store = self.store
        run = store.match(blocks).run
        store.open(run, NAMESPACE, 1)
        store.commit(run, blocks)
        self._runs[request] = run, len(blocks)

    def grow(self, request: int, block: Sequence[Name]) -> None:
        run, full = self._runs[request]
        self.store.commit(run, block, full)
        self.store.open(run, NAMESPACE, 1)
        self._runs[request] = run, full + 1

    def fork(self, request: int, other: int) -> None:
        run, full = self._runs[request]
        forked = self.store.fork(run, full)
        self.store.open(forked, NAMESPACE, 1)
        self._runs[other] = forked, full

    def finish(self, request: int, _: object) -> None:
        self.store.free(self._runs.pop(request)[0])


class NanoSide:
    """A block manager of the baseline; of each block its key or its tokens, whichever it takes."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._tables: dict[int, list[int]] = {}

    @property
    def hits(self) -> int:
        return self._manager.hits

    def arrive(self, request: int, blocks: Sequence[bytes]) -> None:
        self._tables[request] = self._manager.seat(blocks)

    def grow(self, request: int, block: bytes) -> None:
        self._manager.grow(self._tables[request], block)

    def fork(self, request: int, other: int) -> None:
        self._tables[other] = self._manager.fork(self._tables[request])

    def finish(self, request: int, _: object) -> None:
        self._manager.release(self._tables.pop(request))


Argument = Callable[[Sequence[int]], Any]  # what a side wants to know of blocks


def _replay(trace: Trace, side: Side, prompt: Argument, block: Argument) -> float:
    """Seconds of all calls."""
    calls: list[tuple[Callable[[int, Any], None], int, Any]] = []
    for event in trace.events:
        if event.kind == ARRIVE:
            calls.append((side.arrive, event.request, prompt(event.blocks)))
        elif event.kind == GROW:
            calls.append((side.grow, event.request, block(event.blocks)))
        elif event.kind == FORK:
            calls.append((side.fork, event.request, event.other))
        else:
            calls.append((side.finish, event.request, None))

    def run() -> None:
        for call, request, what in calls:
            call(request, what)

    return timed(run)


def measure(blocks: int, requests: int, seed: int, rounds: int) -> dict[str, Any]:
    """All sides in turns; one round before the counted ones warms up."""
    trace = record(blocks, requests, seed)
    keys, tokens = trace.keys, trace.tokens
    names = [caller_name(NAMESPACE, key) for key in keys]
    hits: dict[str, int] = {}

    def nano(name: str, kind: type[BlockManager], queue: Any, what: list[bytes]) -> Callable[[], float]:
        def run() -> float:
            side = NanoSide(kind(blocks, queue))
            seconds = _replay(trace, side, lambda ids: [what[i] for i in ids], lambda ids: what[ids[0]])
            hits[name] = side.hits
            return seconds

        return run

    def store() -> float:
        side = StoreSide(blocks)
        with side.store:
            seconds = _replay(trace, side, lambda ids: [names[i] for i in ids], lambda ids: [names[i] for i in ids])
            hits["store"] = side.hits
            if wrong := side.store.recount():
                raise SystemExit(f"the books of the store do not balance: {wrong}")
        return seconds

    def radix(name: str, make: Callable[[], _radix.RadixSide]) -> Callable[[], float]:
        def run() -> float:
            side = make()
            seconds = _replay(
                trace, side, lambda ids: array("q", [n for i in ids for n in ids_of[i]]), lambda ids: ids_of[ids[0]]
            )
            hits[name] = side.hits
            if wrong := side.recount():
                raise SystemExit(f"the pages of {name} are not all free again: {wrong}")
            return seconds

        return run

    sides = {"store": store}
    for queue_name, queue in (("deque", deque), ("linked queue", LinkedQueue)):
        sides[f"nano, {queue_name}, keys"] = nano(f"nano, {queue_name}, keys", BlockManager, queue, keys)
        name = f"nano, {queue_name}, hashing"
        sides[name] = nano(name, HashingBlockManager, queue, tokens)
    missing = _radix.missing()
    if missing is None:
        ids_of = [array("q", array("i", text)) for text in tokens]
        sides |= {name: radix(name, make) for name, make in _radix.sides(blocks, trace.block_tokens).items()}
    in_turns(sides, 1)
    seconds = in_turns(sides, rounds)
    prompts = [len(event.blocks) for event in trace.events if event.kind == ARRIVE]
    return {
        "requests": requests,
        "blocks": blocks,
        "seed": seed,
        "operations": trace.operations,
        "seated": sum(prompts),
        "prompt_blocks": statistics.median(prompts),
        "distinct_blocks": len(keys),
        "radix_missing": missing,
        "sglang": None if missing else _radix.installed(),
        "sides": [
            {
                "name": name,
                "operations_per_s": trace.operations / statistics.median(times),
                "hits": hits[name],
                "target": name.startswith("nano, deque"),
            }
            | ({} if name == "store" else {"ratio": asdict(ratio(times, seconds["store"]))})
            for name, times in seconds.items()
        ],
    }
