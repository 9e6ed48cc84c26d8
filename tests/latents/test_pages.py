"""Pages against plain copies: kept, gone on from, renumbered and freed in any order, in pools large and small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from torch import Tensor

from redknot.latents.handles import PoolFullError, Run, StaleHandleError
from redknot.latents.pages import Pages
from redknot.latents.segment import Segment
from redknot.latents.session import Session
from redknot.latents.sizing import slot_bytes
from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace
from tests.kit.memory import nan_space
from tests.kit.tiny import geometry_of

G = replace(geometry_of("nano"), max_positions=512)
BLOCK = G.block_length
KINDS = [(n, kind) for n in range(G.num_layers) if G.ratio(n) for kind in ("entries", "index_keys")]
KINDS = [(n, kind) for n, kind in KINDS if kind == "entries" or G.ratio(n) == G.csa_ratio]
CUTS = ([300], [40, 300], [32, 33, 300], [7, 100, 64, 300])  # segments of a request, the last one open
NUMBER = st.integers(0, 9)
Rows = dict[tuple[str, int, int, int], Tensor]  # kind, layer, first position of the segment, row


@dataclass(eq=False)
class Plain:
    """A session, and copies of all that was written in it: windows by position, entries by segment and row."""

    memory: Workspace
    session: Session
    cut: int
    pages: list[int] = field(default_factory=list)
    rows: Rows = field(default_factory=dict)
    at: int = 0


def cut_of(number: int) -> list[Segment]:
    starts = [0, *accumulate(CUTS[number])]
    pieces = list(zip(starts, CUTS[number], strict=False))
    return [Segment(lo, 0, n, closed=True) for lo, n in pieces[:-1]] + [Segment(pieces[-1][0], 0, 0, closed=False)]


def tails_at(rows: Rows, end: int) -> dict[int, Tensor]:
    """What a layer keeps of the last positions, here their first numbers."""
    lo = max(end - 3, 0)
    return {n: torch.stack([rows["window", n, 0, p][:1] for p in range(lo, end)]) for n, _ in KINDS}


def in_front(rows: Rows, segments: list[Segment], end: int) -> Rows:
    """What somebody who goes on from ``end`` may read."""
    found = {}
    for (kind, layer, first, row), values in rows.items():
        if kind == "window":
            if end - G.window <= row < end:
                found[kind, layer, first, row] = values
        elif first + (row + 1) * G.ratio(layer) <= end:
            found[kind, layer, first, row] = values
    return found


class Machine(RuleBasedStateMachine):
    blocks = 150

    def __init__(self) -> None:
        super().__init__()
        self.space: LatentSpace = nan_space(G, device_bytes=self.blocks * slot_bytes(LatentSpace(G).layout), arenas=6)
        self.pages = Pages(self.space)
        self.sessions: list[Plain] = []
        self.kept: dict[int, tuple[int, int, Rows]] = {}  # cut, end, what must be found
        self.taken: list[Run] = []
        self.value = 0
        self.lists: list[list[int]] = []  # pages of requests, also of those that ended

    def pick(self, number: int) -> Plain | None:
        return self.sessions[number % len(self.sessions)] if self.sessions else None

    def start(self, cut: int) -> Plain | None:
        memory = Workspace(self.space)
        try:
            segments = cut_of(cut)
            for segment in segments:
                memory.allocate(segment, segment.length or BLOCK * 6, tokens=segment.length)
            return Plain(memory, memory.session(segments), cut)
        except PoolFullError:
            memory.close()
            return None

    @rule(cut=st.integers(0, len(CUTS) - 1), rows=st.sampled_from([33, 64, 96, 160]), first_page=NUMBER)
    def begin(self, cut: int, rows: int, first_page: int) -> None:
        if len(self.sessions) < 5 and (made := self.start(cut)) is not None:
            self.sessions.append(made)
            self.run(-1, rows, first_page)

    @rule(number=NUMBER, rows=st.sampled_from([1, 5, 32, 70]), first_page=NUMBER)
    def run(self, number: int, rows: int, first_page: int) -> None:
        """Write rows, and keep the pages that they complete."""
        one = self.pick(number)
        if one is None:
            return
        segments, lo, hi = one.session.segments, one.at, min(one.at + rows, 160)
        last = segments[-1]
        try:
            if hi > last.first:
                one.memory.grow(last, hi - last.first)
                last.end = hi - last.first
            for segment, position in self.places(segments, lo, hi):
                self.write(one, segment, position)
        except PoolFullError:
            self.end(number)
            return
        one.at = hi
        for end in range((lo // BLOCK + 1) * BLOCK, hi + 1, BLOCK):
            # A page number is new, or one that stood for something else before.
            page = len(one.pages) + 10 * (first_page % 3)
            one.pages.append(page)
            if len(one.pages) == 1:
                self.lists.append(one.pages)
            for layer, values in tails_at(one.rows, end).items():
                positions = torch.arange(max(end - 3, 0), end)
                one.session.keep_boundary(layer, end, positions, self.raw(layer, values), torch.arange(len(values)))
            self.kept.pop(page, None)
            try:
                self.pages.keep(page, one.session, end)
            except PoolFullError:
                continue
            self.kept[page] = (one.cut, end, in_front(one.rows, segments, end))

    def raw(self, layer: int, values: Tensor) -> list[Tensor]:
        room = self.room(layer)
        return [values.expand(len(values), width) for width in room]

    def room(self, layer: int) -> list[int]:
        with Workspace(self.space) as memory:
            return [rows.shape[1] for rows in memory.session().tail_rows[layer]]

    def places(self, segments: list[Segment], lo: int, hi: int) -> Iterator[tuple[Segment, int]]:
        for position in range(lo, hi):
            yield next(s for s in reversed(segments) if s.first <= position), position

    def write(self, one: Plain, segment: Segment, position: int) -> None:
        row = position - segment.first
        for layer, held in enumerate(segment.layers):
            self.value += 1
            held.window[row] = float(self.value)
            one.rows["window", layer, 0, position] = held.window[row].clone()
        for layer, kind in KINDS:
            entry, rest = divmod(row + 1, G.ratio(layer))
            if not rest:
                self.value += 1
                rows = getattr(segment.layers[layer], kind)
                rows[entry - 1 : entry] = torch.full((1, rows.width), float(self.value))
                one.rows[kind, layer, segment.first, entry - 1] = torch.full((rows.width,), float(self.value))

    @rule(number=NUMBER, count=st.integers(1, 5))
    def go_on(self, number: int, count: int) -> None:
        """A request goes on from the first pages of another, as far as they are still what they were."""
        if not self.lists:
            return
        asked = self.lists[-1 - number % len(self.lists)][:count]
        for cut in range(len(CUTS)):
            found = [self.kept.get(page) for page in asked]
            good = [one is not None and one[:2] == (cut, (at + 1) * BLOCK) for at, one in enumerate(found)]
            usable = self.pages.kept(asked, cut_of(cut))
            assert usable >= [*good, False].index(False)  # cuts that are the same in front of the end are the same
            if usable and all(good[:usable]) and self.chained(asked[:usable]) and len(self.sessions) < 5:
                self.resume(cut, asked[:usable])

    def chained(self, asked: list[int]) -> bool:
        """Whether each page begins with what the ones before hold: a server's tree sees to that."""
        rows = [self.kept[page][2] for page in asked]
        return all(torch.equal(v, rows[-1][key]) for part in rows for key, v in part.items() if key in rows[-1])

    def resume(self, cut: int, asked: list[int]) -> None:
        one = self.start(cut)
        if one is None:
            return
        segments = {segment.first: segment for segment in one.session.segments if segment.length or segment.blocks}
        end, wanted = len(asked) * BLOCK, dict(self.kept[asked[-1]][2])
        last = one.session.segments[-1]
        try:
            if end > last.first:
                one.memory.grow(last, end - last.first)
                last.end = end - last.first
        except PoolFullError:
            one.memory.close()
            return
        for (first, number), handle in self.pages.blocks(asked).items():
            blocks = segments[first].blocks
            assert blocks is not None
            blocks.adopt(number, handle)
        self.pages.restore(asked[-1], one.session)
        for (kind, layer, first, row), values in wanted.items():
            if kind == "window":
                segment = next(s for s in reversed(one.session.segments) if s.first <= row)
                held = segment.layers[layer].window[row - segment.first]
            else:
                held = getattr(segments[first].layers[layer], kind)[row : row + 1][0]
            assert torch.equal(held, values), (kind, layer, first, row)
        for layer, values in tails_at(wanted, end).items():
            tail = one.session.tails[layer]
            assert tail.positions.tolist() == list(range(max(end - 3, 0), end))
            assert all(torch.equal(raw, values.expand(raw.shape)) for raw in tail.raw)
        one.at, one.rows, one.pages = end, wanted, list(asked)
        self.sessions.append(one)

    @rule(page=st.integers(0, 29), other=st.integers(0, 29))
    def alias(self, page: int, other: int) -> None:
        if page in self.kept:
            self.pages.alias(page, other)
            self.kept[other] = self.kept[page]
        else:
            with pytest.raises(KeyError):
                self.pages.alias(page, other)

    @rule(pages=st.lists(st.integers(0, 29), max_size=4))
    def free(self, pages: list[int]) -> None:
        self.pages.free(pages)
        for page in pages:
            self.kept.pop(page, None)

    @rule()
    def clear(self) -> None:
        self.pages.clear()
        self.kept.clear()

    @rule(number=NUMBER)
    def end(self, number: int) -> None:
        one = self.pick(number)
        if one is not None:
            self.sessions.remove(one)
            one.memory.close()

    @rule()
    def take(self) -> None:
        """Somebody else takes what room there is, or gives it back."""
        if self.taken:
            self.space.store.free(self.taken.pop())
        else:
            self.taken.append(self.space.store.allocate("", self.space.store.room()))

    @invariant()
    def balanced(self) -> None:
        assert self.space.store.recount() == []
        assert len(self.pages) == len(self.kept)

    def teardown(self) -> None:
        for one in self.sessions:
            one.memory.close()
        self.pages.clear()
        for run in self.taken:
            self.space.store.free(run)
        books = self.space.store.books()
        assert (books["device"].live, books["arena"].live) == (0, 0)
        self.space.close()


class Tight(Machine):
    blocks = 40


@pytest.mark.parametrize("machine", [Machine, Tight])
def test_pages_in_any_order(machine: type[Machine]) -> None:
    examples = settings().max_examples  # of the profile
    run_state_machine_as_test(machine, settings=settings(max_examples=examples // 3, stateful_step_count=40))


def test_a_page_of_a_request_that_ended_keeps_nothing() -> None:
    space = nan_space(G)
    pages = Pages(space)
    with Workspace(space) as memory:
        segment = Segment(0, 0, BLOCK, closed=False)
        memory.allocate(segment, BLOCK)
        session = memory.session([segment])
    with pytest.raises(StaleHandleError):
        pages.keep(1, session, BLOCK)
    assert len(pages) == 0
    assert space.store.recount() == []
    assert space.store.books()["device"].live == 0
