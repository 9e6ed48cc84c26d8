"""Plans: which runs are reused, why the others are not, and what a client's spans say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from redknot.errors import DocumentReason
from redknot.model.profile import SHIPPED, Profile, Protected, Selector
from redknot.nano.parameters import GEOMETRY
from redknot.plan.planner import Known, Plan, PlannedDocument, Span, make_plan
from redknot.plan.rows import KnownRun, repaired_rows
from redknot.plan.search import Match

BLOCK = GEOMETRY.block_length
EVERY = frozenset({"latents", "window_all", "window_tail", "streams:1", "zl:1:0"})
KNOWN = {
    "a": Known(300, EVERY),
    "b": Known(100, EVERY),
    "tail": Known(200, frozenset({"latents", "window_tail"})),
    "none": Known(200, frozenset({"latents", "window_none"})),
    "some": Known(200, frozenset({"latents", "window_checkpoints:4"})),
}
ROWSPARSE, TURBO = SHIPPED["rowsparse"], SHIPPED["turbo"]


def plan(matches: list[Match], spans: list[Span] | None = None, profile: Profile = ROWSPARSE, **options) -> Plan:
    return make_plan(1000, matches, spans, KNOWN, profile, GEOMETRY, **options)


def fates(found: Plan) -> list[tuple[str | None, int, int, DocumentReason | None]]:
    return [(document.artifact_id, document.start, document.length, document.reason) for document in found.documents]


def test_matches_become_runs_in_request_order():
    found = plan([Match("b", 400, 0, 100), Match("a", 10, 32, 96)])
    assert found.runs == (KnownRun("a", 10, 32, 96, 300), KnownRun("b", 400, 0, 100, 100))
    assert fates(found) == [("a", 10, 96, None), ("b", 400, 100, None)]
    assert found.total == 1000


def test_nothing_known():
    assert plan([]) == Plan(1000, (), ())
    assert plan([], []) == Plan(1000, (), ())


def test_reasons_of_matches():
    assert fates(plan([Match("tail", 0, 0, 200)])) == [("tail", 0, 200, DocumentReason.NOT_BUILT)]
    assert fates(plan([Match("a", 5, 0, 64)])) == [("a", 5, 64, DocumentReason.NOT_WORTH_IT)]
    # An exact prefix is not repaired, so it is worth it.
    assert fates(plan([Match("a", 0, 0, 64)])) == [("a", 0, 64, None)]


def test_parts_need_all_window_rows():
    assert plan([Match("tail", 0, 0, 200)], profile=TURBO).documents[0].reason is None
    assert plan([Match("tail", 0, 0, 96)], profile=TURBO).documents[0].reason is DocumentReason.NOT_BUILT
    assert plan([Match("tail", 0, 96, 104)], profile=TURBO).documents[0].reason is None
    assert plan([Match("a", 0, 0, 96)], profile=TURBO).documents[0].reason is None


def test_windows_that_are_recomputed_serve_any_end():
    for name in ("none", "some"):
        for match in (Match(name, 0, 0, 200), Match(name, 0, 0, 96), Match(name, 9, 64, 96)):
            assert plan([match], profile=TURBO).documents[0].reason is None
            assert plan([match]).documents[0].reason is DocumentReason.NOT_BUILT


def test_the_recent_tail_counts_in_the_break_even():
    profile = Profile(name="p", protected=Protected(recent_tail=200))
    assert plan([Match("a", 700, 0, 300)], profile=profile).documents[0].reason is None
    assert plan([Match("b", 800, 0, 100)], profile=profile).documents[0].reason is DocumentReason.NOT_WORTH_IT


def test_what_ranking_costs_counts_in_the_break_even():
    """Of nano's 12 layers a skipped row misses 11; the probe runs the last window of the request in all 12."""
    tokens = 64 + 34  # the first and last window run again, in whole groups of 4
    known = {"a": Known(tokens, EVERY)}
    behind = GEOMETRY.window

    def fate(profile: Profile, documents: int, room: int) -> set[DocumentReason | None]:
        matches = [Match("a", 1 + number * tokens, 0, tokens) for number in range(documents)]
        found = make_plan(1 + documents * tokens + room, matches, None, known, profile, GEOMETRY)
        assert len(found.runs) == sum(document.reason is None for document in found.documents)
        return {document.reason for document in found.documents}

    idle = tokens - 32 - 34
    assert idle * 11 <= behind * 12 < 2 * idle * 11
    assert fate(ROWSPARSE, 1, behind) == {DocumentReason.NOT_WORTH_IT}
    assert fate(ROWSPARSE, 2, behind) == {None}
    assert fate(ROWSPARSE, 1, behind - 3) == {None}  # a shorter question is a cheaper probe
    assert fate(TURBO, 1, behind) == {None}  # picks no rows: nothing to rank, no probe
    assert fate(SHIPPED["headsplit"], 1, behind) == {None}
    deviation = ROWSPARSE.model_copy(update={"selector": Selector.DEVIATION, "deviation_layer": 4})
    assert fate(deviation, 1, behind) == {DocumentReason.NOT_WORTH_IT}


def test_not_worth_the_ranking_does_not_hide_other_reasons():
    known = {"a": Known(96, EVERY), "tail": KNOWN["tail"]}
    matches = [Match("a", 1, 0, 96), Match("tail", 97, 0, 200)]
    spans = [Span(1, 97), Span(97, 297), Span(300, 340)]
    found = make_plan(340, matches, spans, known, ROWSPARSE, GEOMETRY)
    assert fates(found) == [
        ("a", 1, 96, DocumentReason.NOT_WORTH_IT),
        ("tail", 97, 200, DocumentReason.NOT_BUILT),
        (None, 300, 40, DocumentReason.NO_MATCH),
    ]
    assert found.runs == ()


def test_spans_are_the_documents():
    """One that holds several runs is one document; edges that no run covers count in its length."""
    matches = [Match("a", 12, 0, 96), Match("b", 110, 0, 100), Match("a", 400, 0, 64), Match("b", 700, 32, 32)]
    spans = [Span(10, 215), Span(300, 320), Span(320, 380), Span(395, 470), Span(695, 800)]
    found = plan(matches, spans)
    assert fates(found) == [
        ("b", 10, 205, None),
        (None, 300, 20, DocumentReason.TOO_SHORT),
        (None, 320, 60, DocumentReason.NO_MATCH),
        ("a", 395, 75, DocumentReason.NOT_WORTH_IT),
        ("b", 695, 105, DocumentReason.NOT_WORTH_IT),
    ]
    assert [run.start for run in found.runs] == [12, 110]


def test_a_span_with_one_good_run_is_reused():
    found = plan([Match("a", 0, 0, 64), Match("tail", 64, 0, 200)], [Span(0, 264)])
    assert fates(found) == [("a", 0, 264, None)]


def test_somebody_elses_name():
    """The span is new text even where its content would match; other spans are not concerned."""
    spans = [Span(10, 110, "theirs"), Span(200, 300, "b"), Span(400, 500)]
    matches = [Match("b", start, 0, 100) for start in (10, 200, 400)]
    found = plan(matches, spans, foreign={"theirs"})
    assert fates(found) == [
        ("theirs", 10, 100, DocumentReason.OTHER_NAMESPACE),
        ("b", 200, 100, None),
        ("b", 400, 100, None),
    ]
    assert [run.start for run in found.runs] == [200, 400]


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[Match], list[Span] | None]:
    at, matches, spans = 0, [], []
    for _ in range(draw(st.integers(0, 6))):
        start = at + draw(st.integers(0, 40))
        name = draw(st.sampled_from(sorted(KNOWN)))
        tokens = KNOWN[name].tokens
        doc_start = BLOCK * draw(st.integers(0, (tokens - 1) // BLOCK))
        length = draw(st.sampled_from([tokens - doc_start, min(BLOCK, tokens - doc_start)]))
        if draw(st.booleans()):
            matches.append(Match(name, start, doc_start, length))
        at = start + length
        spans.append(Span(start, at, draw(st.sampled_from([None, name, "theirs"]))))
    shuffled = draw(st.permutations(matches))
    return list(shuffled), spans if draw(st.booleans()) else None


@given(requests(), st.sampled_from(list(SHIPPED.values())), st.integers(0, 3))
def test_plans_hold_together(request, profile, room):
    """Runs ascend without overlap, every run has rows to save and what the profile needs; every document its fate."""
    matches, spans = request
    total = max([match.end for match in matches] + [span.end for span in spans or []], default=0) + room
    found = make_plan(total, matches, spans, KNOWN, profile, GEOMETRY, {"theirs"})
    at = 0
    for one in found.runs:
        assert one.start >= at
        at = one.stop
        assert set(profile.needs()) <= KNOWN[one.artifact_id].needs
        assert one.length >= BLOCK
        assert not repaired_rows(one, total, profile, GEOMETRY.window, GEOMETRY.csa_ratio).all()
    for document in found.documents:
        inside = [one for one in found.runs if document.start <= one.start < document.start + document.length]
        assert bool(inside) == (document.reason is None)
    if spans is None:
        assert len(found.documents) == len(matches)
        assert len(found.runs) == sum(document.reason is None for document in found.documents)
    else:
        assert [(d.start, d.start + d.length) for d in found.documents] == [(s.start, s.end) for s in spans]
        for span, document in zip(spans, found.documents, strict=True):
            foreign = document.reason is DocumentReason.OTHER_NAMESPACE
            assert foreign == (span.artifact_id == "theirs")
    assert found.documents == tuple(sorted(found.documents, key=lambda document: document.start))
    assert all(isinstance(document, PlannedDocument) for document in found.documents)
