"""The content matcher against a naive implementation of the same definition, and its edges."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redknot.errors import InputError
from redknot.plan import search as search_module
from redknot.plan.hashing import RollingHash
from redknot.plan.match import match_spans, match_tokens
from redknot.plan.search import Match
from redknot.plan.token_index import TokenIndex

BLOCK = 128
LENGTHS = (1, 3, 4, 127, 128, 129, 255, 256, 257)


class ForcedCollisions(RollingHash):
    """Keeps only some bits of every hash: 0 bits make all contents of one length collide."""

    def __init__(self, bits: int) -> None:
        super().__init__(seed=7)
        self.mask = np.uint64(((1 << bits) - 1) << 40)

    def windows(self, prefix: Any, lengths: Any, starts: Any = None) -> Any:
        return super().windows(prefix, lengths, starts) & self.mask


def ids(values: Any) -> npt.NDArray[np.int32]:
    return np.asarray(values, np.int32)


def random_ids(seed: int, length: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 129280, length, dtype=np.int32)


def build(documents: list[Any], block: int = BLOCK, **options: Any) -> TokenIndex:
    options.setdefault("hasher", RollingHash(seed=1))
    index = TokenIndex(block, **options)
    for number, tokens in enumerate(documents):
        index.add(f"d{number}", ids(tokens))
    return index


def naive(request: list[int], documents: dict[str, list[int]], block: int) -> list[Match]:
    """The definition at the top of redknot/plan/match.py, word for word."""

    def best_in(left: int, right: int) -> list[Match]:
        best: tuple[Any, ...] | None = None
        for start in range(left, right):
            for rank, (name, document) in enumerate(documents.items()):
                if len(document) < block:
                    continue
                for doc_start in range(0, len(document), block):
                    same = 0
                    longest = min(right - start, len(document) - doc_start)
                    while same < longest and request[start + same] == document[doc_start + same]:
                        same += 1
                    ends = doc_start + same == len(document)
                    if not ends:
                        same -= same % block
                    if ends and same < block and doc_start > 0:
                        continue  # a tail alone is no run
                    if same:
                        key = (-same, start, not ends, rank, doc_start)
                        if best is None or key < best[0]:
                            best = (key, Match(name, start, doc_start, same))
        if best is None:
            return []
        found: Match = best[1]
        return [*best_in(left, found.start), found, *best_in(found.end, right)]

    return best_in(0, len(request))


def assert_valid(matches: tuple[Match, ...], request: Any, documents: dict[str, list[int]], block: int) -> None:
    cursor = 0
    for match in matches:
        document = documents[match.artifact_id]
        assert match.start >= cursor
        assert match.length > 0
        assert match.doc_start % block == 0
        assert match.length % block == 0 or match.doc_start + match.length == len(document)
        assert list(request[match.start : match.end]) == document[match.doc_start : match.doc_start + match.length]
        cursor = match.end
    assert cursor <= len(request)


@st.composite
def corpora(draw: st.DrawFn) -> tuple[int, list[list[int]], list[int]]:
    """Few symbols, so that everything nearly matches; the request is mostly cut from the documents."""
    block = draw(st.integers(1, 4))
    token = st.integers(0, draw(st.integers(0, 2)))
    documents = draw(st.lists(st.lists(token, min_size=1, max_size=14), min_size=1, max_size=6))
    pieces: list[list[int]] = []
    for _ in range(draw(st.integers(0, 5))):
        source = draw(st.sampled_from(documents))
        start = draw(st.integers(0, len(source) - 1))
        pieces.append(draw(st.one_of(st.just(source), st.just(source[start:]), st.lists(token, max_size=3))))
    return block, documents, list(itertools.chain.from_iterable(pieces))


@settings(max_examples=400, deadline=None)
@given(corpora(), st.lists(st.integers(0, 5), max_size=6))
def test_equals_the_naive_definition(corpus: tuple[int, list[list[int]], list[int]], schedule: list[int]) -> None:
    """Also with searches between additions (several segments) and with documents removed."""
    block, documents, request = corpus
    index = TokenIndex(block, hasher=RollingHash(seed=3))
    held: dict[str, list[int]] = {}
    for number, document in enumerate(documents):
        index.add(f"d{number}", ids(document))
        held[f"d{number}"] = document
        if number in schedule[:3]:
            match_tokens(ids(request), index)
    for number in schedule[3:]:
        if f"d{number}" in held:
            index.remove(f"d{number}")
            del held[f"d{number}"]
    assert len(index) == len(held)
    found = match_tokens(ids(request), index)
    assert_valid(found, request, held, block)
    assert list(found) == naive(request, held, block)
    assert index.counters == {"match_collisions": 0, "match_cut_short": 0}


@settings(max_examples=200, deadline=None)
@given(corpora(), st.integers(0, 6))
def test_colliding_hashes_never_give_a_wrong_match(corpus: tuple[int, list[list[int]], list[int]], bits: int) -> None:
    block, documents, request = corpus
    index = build(documents, block, hasher=ForcedCollisions(bits))
    held = {f"d{number}": document for number, document in enumerate(documents)}
    assert_valid(match_tokens(ids(request), index), request, held, block)
    cuts = sorted({0, len(request) // 3, len(request) // 2, len(request)})
    assert_valid(match_spans(ids(request), list(itertools.pairwise(cuts)), index), request, held, block)


@settings(max_examples=100, deadline=None)
@given(corpora())
def test_without_patience_matches_stay_valid_and_maximal(
    corpus: tuple[int, list[list[int]], list[int]],
) -> None:
    block, documents, request = corpus
    index = build(documents, block)
    held = {f"d{number}": document for number, document in enumerate(documents)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "_PATIENCE", 0)
        found = match_tokens(ids(request), index)
    assert_valid(found, request, held, block)
    left_over = [(0, 0), *((match.start, match.end) for match in found), (len(request), len(request))]
    for (_, end), (start, _) in itertools.pairwise(left_over):
        assert naive(request[end:start], held, block) == []


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("offset", [0, 1, 3, 4, 127, 128, 129, 1000])
@pytest.mark.parametrize("behind", [0, 1, 127, 128, 300])
def test_a_document_is_found_whole_at_any_offset(length: int, offset: int, behind: int) -> None:
    document = random_ids(length, length)
    request = np.concatenate([random_ids(1000, offset), document, random_ids(1001, behind)])
    index = build([random_ids(2000, 512), document])
    found = match_tokens(request, index)
    assert found == ((Match("d1", offset, 0, length),) if length >= BLOCK else ())


def test_every_length_side_by_side_in_any_order_and_twice() -> None:
    documents = [random_ids(number, length) for number, length in enumerate(LENGTHS)]
    index = build(documents)
    order = [8, 3, 0, 5, 5, 1, 7, 4, 2, 6, 3, 8]
    found = match_tokens(np.concatenate([documents[number] for number in order]), index)
    known = [number for number in order if LENGTHS[number] >= BLOCK]
    assert [match.artifact_id for match in found] == [f"d{number}" for number in known]
    assert all(match.length == LENGTHS[number] for match, number in zip(found, known, strict=True))


@pytest.mark.parametrize("length", [255, 256, 257, 300, 1024])
def test_merged_edge_tokens_cost_the_edge_blocks_only(length: int) -> None:
    document = random_ids(5, length)
    index = build([document])
    first, last, both = document.copy(), document.copy(), document.copy()
    first[0] = both[0] = last[-1] = both[-1] = 129280
    whole_blocks = length // BLOCK * BLOCK
    aligned = length % BLOCK == 0
    assert match_tokens(first, index) == (Match("d0", BLOCK, BLOCK, length - BLOCK),) * (length >= 2 * BLOCK)
    assert match_tokens(last, index) == (Match("d0", 0, 0, whole_blocks - BLOCK * aligned),)
    kept = whole_blocks - BLOCK - BLOCK * aligned
    assert match_tokens(both, index) == (Match("d0", BLOCK, BLOCK, kept),) * (kept > 0)


def test_a_changed_middle_splits_the_document() -> None:
    document = random_ids(6, 1000)
    request = document.copy()
    request[500] += 1
    assert match_tokens(request, build([document])) == (Match("d0", 0, 0, 384), Match("d0", 512, 512, 488))


def test_the_longest_run_wins_over_an_earlier_one() -> None:
    """A licence text at the head of one document lies inside another whose first token has merged."""
    licence = random_ids(7, 900)
    other = np.concatenate([licence, random_ids(8, 200)])
    document = np.concatenate([random_ids(9, 50), licence, random_ids(10, 2000)])
    request = document.copy()
    request[0] += 1
    assert match_tokens(request, build([other, document])) == (Match("d1", 128, 128, 2950 - 128),)


def test_ties_are_broken_by_end_then_age_then_place() -> None:
    piece = random_ids(11, 256)
    longer = np.concatenate([piece, random_ids(12, 256)])
    assert match_tokens(piece, build([longer, piece, piece])) == (Match("d1", 0, 0, 256),)
    assert match_tokens(piece, build([longer, longer])) == (Match("d0", 0, 0, 256),)
    twice = np.concatenate([piece, random_ids(13, 128), piece, random_ids(14, 128)])
    assert match_tokens(piece, build([twice])) == (Match("d0", 0, 0, 256),)


def test_age_decides_across_segments_too() -> None:
    piece = random_ids(15, 256)
    index = TokenIndex(BLOCK)
    index.add("big", random_ids(16, 5000))
    index.add("old", piece)
    match_tokens(piece, index)
    index.add("new", piece)
    assert match_tokens(piece, index)[0].artifact_id == "old"
    assert len(index.segments()) == 2
    index.remove("old")
    assert match_tokens(piece, index)[0].artifact_id == "new"
    index.add("old", piece)
    assert match_tokens(piece, index)[0].artifact_id == "new"


def test_the_tail_chooses_between_documents_with_equal_blocks() -> None:
    head = random_ids(17, 512)
    documents = [np.concatenate([head, random_ids(18 + length, length)]) for length in (0, 5, 6, 90, 91, 127)]
    index = build(documents)
    for number, document in enumerate(documents):
        request = np.concatenate([document, random_ids(99, 200)])
        assert match_tokens(request, index) == (Match(f"d{number}", 0, 0, document.size),)
    unknown = np.concatenate([head, random_ids(98, 40)])
    assert match_tokens(unknown, index) == (Match("d0", 0, 0, 512),)
    index.remove("d3")
    assert match_tokens(documents[3], index) == (Match("d0", 0, 0, 512),)


def test_repeated_tokens() -> None:
    index = build([np.full(512, 7), np.full(300, 7), np.concatenate([np.full(512, 7), random_ids(20, 512)])])
    found = match_tokens(ids(np.full(512 * 3 + 300 + 50, 7)), index)
    lengths = [(match.artifact_id, match.length) for match in found]
    assert lengths == [("d0", 512)] * 3 + [("d1", 300)]


def test_forced_collision_is_a_counted_miss() -> None:
    known, other = random_ids(21, 256), random_ids(22, 256)
    index = build([known], hasher=ForcedCollisions(0))
    assert match_tokens(other, index) == ()
    assert index.counters["match_collisions"] > 0
    assert match_spans(other, [(0, 256)], index) == ()
    assert match_tokens(known, index) == (Match("d0", 0, 0, 256),)
    assert match_spans(known, [(0, 256)], index) == (Match("d0", 0, 0, 256),)


def test_a_flood_of_collisions_ends_the_search() -> None:
    index = build([random_ids(23, 1024) for _ in range(20)], hasher=ForcedCollisions(0))
    assert match_tokens(random_ids(24, 20_000), index) == ()
    assert index.counters["match_cut_short"] == 1
    assert index.counters["match_collisions"] < 1000


def test_thue_morse_blocks_collide_at_worst() -> None:
    """The known weakness of polynomial hashes modulo 2^64: two different contents, perhaps one hash, no match."""
    bits = np.array([bin(number).count("1") % 2 for number in range(2048)])
    index = build([bits], block=2048)
    assert match_tokens(ids(1 - bits), index) == ()
    assert match_tokens(ids(bits), index) == (Match("d0", 0, 0, 2048),)


def test_removal_forgets_and_readding_finds() -> None:
    documents = [random_ids(30 + number, 300) for number in range(9)]
    index = build(documents)
    request = np.concatenate(documents)
    for number in range(9):
        assert len(match_tokens(request, index)) == 9 - number
        index.remove(f"d{number}")
        assert f"d{number}" not in index
    assert len(index) == 0
    assert match_tokens(request, index) == ()
    assert match_spans(request, [(0, 300)], index) == ()
    index.add("d0", documents[0])
    assert match_tokens(request, index) == (Match("d0", 0, 0, 300),)
    assert index.length("d0") == 300
    index.remove("d0")  # while still pending or sealed: both paths are taken here
    index.add("d0", documents[1])
    index.remove("d0")
    assert match_tokens(request, index) == ()


def test_many_additions_with_searches_between_keep_few_segments() -> None:
    index = TokenIndex(BLOCK)
    for number in range(200):
        index.add(str(number), random_ids(number, 130))
        assert len(index.segments()) <= 9
    for number in (0, 99, 199):
        assert match_tokens(random_ids(number, 130), index) == (Match(str(number), 0, 0, 130),)


def test_the_index_keeps_its_own_copy() -> None:
    document = random_ids(40, 256)
    request = document.copy()
    index = build([])
    index.add("a", document)
    document[:] = 0
    assert match_tokens(request, index) == (Match("a", 0, 0, 256),)


def test_spans_find_the_whole_document_first_and_stay_inside() -> None:
    first, second, short = random_ids(50, 300), random_ids(51, 200), random_ids(52, 20)
    index = build([first, second, np.concatenate([first, second]), short])
    request = np.concatenate([first, second, short])
    assert [match.artifact_id for match in match_tokens(request, index)] == ["d2"]
    spans = [(0, 300), (300, 500), (500, 520)]
    assert match_spans(request, spans, index) == (
        Match("d0", 0, 0, 300),
        Match("d1", 300, 0, 200),
    )
    assert match_spans(request, [(10, 500)], index) == (Match("d2", 128, 128, 372),)
    inside = match_spans(request, [(1, 299)], index)
    assert inside == (Match("d0", 128, 128, 128),)
    assert match_spans(request, [], index) == ()


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 0)], "span 0 is"),
        ([(5, 3)], "span 0 is"),
        ([(-1, 3)], "span 0 is"),
        ([(0, 101)], "span 0 is"),
        ([(0, 50), (49, 60)], "span 1 starts"),
        ([(50, 60), (0, 10)], "span 1 starts"),
        ([(0, 1.5)], "pair of integers"),
        ([(0,)], "pair of integers"),
        ([(0, 1, 2)], "pair of integers"),
        ([None], "pair of integers"),
        ([("0", "9")], "pair of integers"),
    ],
)
def test_bad_spans_are_refused(spans: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        match_spans(random_ids(60, 100), spans, build([random_ids(60, 200)]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "tokens",
    [
        np.zeros((2, 3), np.int32),
        np.zeros((), np.int32),
        np.zeros(5, np.float32),
        np.zeros(5, bool),
        np.array(["a"]),
        [1, 2, 3],
        None,
        np.array([1, -1]),
        np.array([2**31], np.int64),
        np.array([2**63], np.uint64),
    ],
)
def test_bad_token_ids_are_refused(tokens: Any) -> None:
    index = build([random_ids(70, 200)])
    for call in (lambda: match_tokens(tokens, index), lambda: index.add("x", tokens)):
        with pytest.raises(InputError) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert len(index) == 1


def test_other_integer_widths_and_strides_are_accepted() -> None:
    document = random_ids(71, 256)
    index = build([document])
    for kind in (np.int64, np.uint32, np.uint64):
        assert match_tokens(document.astype(kind), index) == (Match("d0", 0, 0, 256),)
    assert match_tokens(np.repeat(document, 2)[::2], index) == (Match("d0", 0, 0, 256),)
    largest = np.full(128, 2**31 - 1, np.int64)
    index.add("largest", largest)
    assert match_tokens(largest, index) == (Match("largest", 0, 0, 128),)


def test_empty_inputs() -> None:
    index = build([])
    empty = np.zeros(0, np.int32)
    assert match_tokens(empty, index) == match_tokens(random_ids(80, 500), index) == ()
    assert match_spans(empty, [], index) == ()
    index = build([random_ids(80, 200)])
    assert match_tokens(empty, index) == match_tokens(random_ids(80, 1), index) == ()
    with pytest.raises(InputError, match="no tokens"):
        index.add("empty", empty)


def test_bad_index_use_is_refused() -> None:
    index = build([random_ids(81, 200)])
    with pytest.raises(InputError, match="in the index already"):
        index.add("d0", random_ids(81, 200))
    for call in (index.remove, index.length):
        with pytest.raises(InputError, match="not in the index"):
            call("other")
    for block in (0, -1):
        with pytest.raises(InputError, match="at least 1"):
            TokenIndex(block)
