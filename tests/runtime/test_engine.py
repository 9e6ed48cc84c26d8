"""Requests through the engine: what a client may send, what it gets back, and that nothing leaks between requests."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from redknot.errors import DocumentReason, InputError, RequestReason
from redknot.model.profile import SHIPPED, Treatment
from redknot.plan.planner import Span
from redknot.plan.rows import Rows
from redknot.runtime import engine as engine_module
from redknot.runtime.engine import Engine, Result
from redknot.runtime.ledger import recompute_row_layers, structural_ceiling
from tests.kit.requests import BLOCK, BOS, MAX_POSITIONS, REUSING, document, publish, write_checkpoint
from tests.runtime.conftest import Served
from tests.runtime.test_metrics import samples

QUESTION = document(20, 7)


@pytest.fixture
def engine(served: Served) -> Engine:
    return served.engine()


def flat(*parts: list[int]) -> list[int]:
    return [token for part in parts for token in part]


# What may be asked


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "exactly one of prompt, token_ids and segments"),
        ({"prompt": "a", "token_ids": [5]}, "exactly one of prompt, token_ids and segments"),
        ({"token_ids": [5], "reuse": "maybe"}, "reuse must be one of auto, off, required, not 'maybe'"),
        ({"token_ids": [5], "max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, not 0"),
        ({"token_ids": []}, "the request is empty"),
        ({"token_ids": [5, -1]}, r"token ids must be in \[0, 2048\), found -1..5"),
        ({"token_ids": [5, 2048]}, "found 5..2048"),
        ({"token_ids": [5, 1.5]}, "token_ids must be a list of integers"),
        ({"token_ids": "five"}, "token_ids must be a list of integers, found 'five'"),
        ({"token_ids": 5}, "token_ids must be a list of integers, found 5"),
        ({"token_ids": b"five"}, "token_ids must be a list of integers, found b'five'"),
        ({"token_ids": np.ones((40, 40))}, "token_ids must be a list of integers, found array"),
        ({"token_ids": [0, 5, 0, -3, 0]}, r"token ids must be in \[0, 2048\), found -3..5"),
        ({"prompt": 5}, "prompt must be a text, not int"),
        ({"prompt": b"text"}, "prompt must be a text, not bytes"),
        ({"prompt": ["text"]}, "prompt must be a text, not list"),
        ({"segments": 5}, "segments must be a list of texts or of token id lists, not int"),
        ({"segments": b"ab"}, "segments must be a list of texts or of token id lists, not bytes"),
        ({"segments": {"a": "b"}}, "segments must be a list of texts or of token id lists, not dict"),
        ({"segments": [5, "text"]}, "segment 0 must be a list of integers, found 5"),
        ({"segments": ["text", b"ab"]}, "segment 1 must be a list of integers, found b'ab'"),
        ({"prompt": "a b\n" * 500_000}, "prompt has more than 2048 tokens, the model has 2048 positions"),
        ({"segments": ["?", "a b\n" * 500_000]}, "segment 1 has more than 2048 tokens"),
        ({"token_ids": [5], "reuse": ["auto"]}, "reuse must be one of auto, off, required"),
        ({"segments": "one text"}, "segments must be a list of texts or of token id lists"),
        ({"segments": [[5, None], [6]]}, "segment 0 must be a list of integers"),
        ({"segments": [[5], [BOS, 6], [7]]}, "segment 1 holds the BOS token 0"),
        ({"segments": ["a\ud800b", "c"]}, "lone surrogate"),
        ({"prompt": "text", "spans": [(0, 1)]}, "spans count positions of token_ids"),
        ({"token_ids": [5] * 9, "spans": [(0, 10)]}, r"span 0 is \[0, 10\); supported: 0 <= start < end <= 9"),
        ({"token_ids": [5] * 9, "spans": [(3, 3)]}, r"span 0 is \[3, 3\)"),
        ({"token_ids": [5] * 9, "spans": [(-1, 3)]}, r"span 0 is \[-1, 3\)"),
        ({"token_ids": [5] * 9, "spans": [(3, 6), (5, 9)]}, "span 1 starts at 5, inside the one before"),
        ({"token_ids": [5] * 9, "spans": [(3, 6), (0, 2)]}, "span 1 starts at 0, inside the one before"),
        ({"token_ids": [5] * 9, "spans": [(0.5, 3)]}, "span 0 must be a Span or a pair of integers"),
        ({"token_ids": [5] * 9, "spans": [(0, 1, 2)]}, "span 0 must be a Span or a pair of integers"),
        ({"token_ids": [5], "max_new_tokens": 2.5}, "whole number of at least 1, not 2.5"),
        ({"token_ids": [5], "max_new_tokens": "3"}, "whole number of at least 1, not '3'"),
        ({"token_ids": [5], "max_new_tokens": None}, "whole number of at least 1, not None"),
        ({"token_ids": [5] * 9, "spans": 5}, "spans must be a list of Spans or pairs of integers, found 5"),
        ({"token_ids": [5] * 9, "spans": [7]}, "span 0 must be a Span or a pair of integers"),
    ],
)
@pytest.mark.parametrize("reuse", ["auto", "off"])
def test_malformed_requests_are_one_line(engine, request_, message, reuse):
    with pytest.raises(InputError, match=message) as error:
        engine.generate(**({"reuse": reuse} | request_))
    assert "\n" not in str(error.value)
    # And the server goes on.
    assert engine.generate(token_ids=[5], max_new_tokens=1).report.prompt_tokens == 1


def test_a_prompt_that_is_too_long_names_both_numbers(served):
    engine = Engine(served.checkpoint)
    with pytest.raises(InputError, match=r"2045 prompt tokens and 4 new ones exceed the model's 2048 positions"):
        engine.generate(token_ids=[5] * (MAX_POSITIONS - 3), max_new_tokens=4)
    with pytest.raises(InputError, match=r"2049 prompt tokens"):
        engine.generate(segments=[[5] * 1000, [6] * 1000, [7] * 48], max_new_tokens=1)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor], ids=["list", "tuple", "numpy", "torch"])
def test_ids_of_any_kind(engine, served, kind):
    ids = flat([BOS], served.documents[0], QUESTION)
    result = engine.generate(token_ids=kind(ids), max_new_tokens=2)
    assert result.report.arm == "reuse"
    assert result.report.certified == 1
    assert engine.generate(token_ids=kind(ids), max_new_tokens=1, reuse="off").report.certified == 0
    assert result.token_ids == engine.generate(token_ids=ids, max_new_tokens=2).token_ids
    again = engine.generate(segments=[kind(served.documents[0]), kind(QUESTION)], max_new_tokens=2)
    assert again.token_ids == result.token_ids


@pytest.mark.parametrize(
    "request_",
    [{"prompt": ""}, {"segments": []}, {"segments": ["", "?"]}, {"segments": [" \n\t ", "?"]}, {"prompt": "?"}],
    ids=str,
)
def test_next_to_nothing_is_answered_dense(engine, request_):
    result = engine.generate(**request_, max_new_tokens=2)
    assert (result.report.arm, result.report.reason) == ("dense", RequestReason.NOTHING_TO_REUSE)
    assert len(result.token_ids) <= 2


def test_empty_documents_among_others(engine, served):
    a, b = served.documents[:2]
    result = engine.generate(segments=[[], a, [], b, [], QUESTION], max_new_tokens=2)
    assert [(d.start, d.length) for d in result.report.documents] == [(1, 96), (97, 130)]
    assert result.token_ids == engine.generate(segments=[a, b, QUESTION], max_new_tokens=2).token_ids


# Boundaries and BOS


def test_bos_once_and_only_at_the_start(engine, served):
    a, b = served.documents[:2]
    result = engine.generate(segments=[a, b, QUESTION], max_new_tokens=2)
    assert result.report.prompt_tokens == 1 + len(a) + len(b) + len(QUESTION)
    same = engine.generate(token_ids=flat([BOS], a, b, QUESTION), max_new_tokens=2)
    assert same.token_ids == result.token_ids
    assert [d.artifact_id for d in same.report.documents] == [d.artifact_id for d in result.report.documents]


def test_ids_are_used_as_they_are(engine, served):
    """Any id of the vocabulary, BOS wherever the client puts it or not at all; control tokens are ids like others."""
    a = served.documents[0]
    for ids in ([*a, *QUESTION], flat([BOS, BOS], a, [BOS], QUESTION), flat([BOS], a, [1, 2], [2047, BOS])):
        result = engine.generate(token_ids=ids, max_new_tokens=2)
        assert result.report.prompt_tokens == len(ids)
        assert [(d.length, d.matched) for d in result.report.documents] == [(96, 96)]


TEXTS = {
    "plain": "The code of the north gate is seven four one. Nobody may know it but the keeper "
    "of the gate himself, who forgets.",
    "spaces": "  two leading spaces, two trailing ones, and more than one  inside of it, as careless people do  ",
    "newlines": "\n\nparagraphs around a line of text that is long enough to be a document\nof two lines or more\n\n",
    "digits": "1234567890 begins and ends in digits, which merge with the digits of a neighbour so easily 0987654321",
    "cjk": "东方的门的密码是七四一,没有人知道它。看门人把它写在一本旧书里,书在塔楼的箱子里,钥匙在河边。",
    "emoji": "🦊🦊 foxes of every kind, families 👨‍👩‍👧 and flags 🇫🇷🇯🇵 stand "
    "at the start, in the middle and at the very end of this document of many animals 🦊",
    "half a pair": "e accents in two code points: cafe\u0301, and a combining mark that stands at the very end: \u0301",
    "control words": "<|bos|>A text that spells out control tokens<|eos|> and is nothing but plain text<|bos|>",
}


@pytest.fixture(scope="module")
def texts(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine with the artifacts of these documents, each tokenised alone."""
    store = tmp_path_factory.mktemp("texts") / "store"
    plain = Engine(served.checkpoint, profile="turbo")
    publish(served.checkpoint, store, [plain.tokenizer.encode(text).tolist() for text in TEXTS.values()])
    return Engine(served.checkpoint, store, "turbo")


@pytest.mark.parametrize("name", TEXTS)
def test_documents_are_found_whatever_they_start_and_end_with(texts, name):
    """Segments: the whole document, first, in the middle and last; the same ids each time."""
    text, length = TEXTS[name], len(texts.tokenizer.encode(TEXTS[name]))
    assert length > 32
    other = TEXTS["plain"]
    for segments, at in (([text, other, "Where?"], 0), ([other, text, "1"], 1), ([other, "new text ", text, " q"], 2)):
        report = texts.generate(segments=segments, max_new_tokens=1).report
        assert report.arm == "reuse"
        found = report.documents[at]
        assert (found.length, found.reason) == (length, None)
        assert found.reused == length - 32


def long_text(name: str) -> str:
    """At least four blocks, the same first and last characters, and nothing that another long text has."""
    middle = " ".join(f"On page {page} of {name} stands number {page * 37}." for page in range(1, 12))
    return TEXTS[name] + middle + TEXTS[name]


@pytest.fixture(scope="module")
def long_texts(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """As ``texts``, of the long ones."""
    store = tmp_path_factory.mktemp("long") / "store"
    plain = Engine(served.checkpoint, profile="turbo")
    documents = [plain.tokenizer.encode(long_text(name)).tolist() for name in TEXTS]
    publish(served.checkpoint, store, documents, [SHIPPED["rowsparse"], SHIPPED["turbo"]])
    return Engine(served.checkpoint, store, "turbo")


@pytest.mark.parametrize("name", TEXTS)
def test_prompt_texts_lose_edge_blocks_at_most(long_texts, name):
    """One text: first or last tokens may merge with their neighbours; blocks that did not are found.

    What is missing is in the report: fewer tokens found than the document has.
    """
    texts, text = long_texts, long_text(name)
    length = len(texts.tokenizer.encode(text))
    assert length >= 4 * BLOCK
    for around in ("{}", "Read this:{}And now:", "7{}7", "\n{}\n", "é{}é"):
        prompt = around.format(text)
        result = texts.generate(prompt=prompt, max_new_tokens=2)
        dense = texts.generate(prompt=prompt, reuse="off", max_new_tokens=2)
        assert result.report.prompt_tokens == dense.report.prompt_tokens == 1 + len(texts.tokenizer.encode(prompt))
        assert result.report.arm == "reuse"
        [found] = result.report.documents
        assert found.reused + found.recomputed == found.length == found.matched
        assert found.artifact_tokens == length
        assert length - 2 * BLOCK <= found.matched <= length


def test_answers_are_text(texts):
    result = texts.generate(segments=[TEXTS["emoji"], "?"], max_new_tokens=5, stop_at_eos=False)
    assert len(result.token_ids) == 5
    assert result.text == texts.tokenizer.decode(result.token_ids)


# Orders, repetitions, places


def test_cached_uncached_cached(engine, served):
    segments = [served.documents[0], document(50, 80), served.documents[1], QUESTION]
    report = engine.generate(segments=segments, max_new_tokens=1).report
    assert [d.reason for d in report.documents] == [None, DocumentReason.NO_MATCH, None]
    assert [d.start for d in report.documents] == [1, 97, 147]
    assert report.documents[1].recomputed == 50
    assert report.reused_tokens == sum(d.reused for d in report.documents) > 0


def test_a_document_twice_and_in_any_order(engine, served):
    a, b = served.documents[0], served.documents[4]
    first = engine.generate(segments=[a, b, a, QUESTION], max_new_tokens=1).report
    assert [d.artifact_id for d in first.documents] == [served.certificates[number].artifact_id for number in (0, 4, 0)]
    assert all(d.reused > 0 for d in first.documents)
    found = {d.artifact_id for d in engine.generate(segments=[b, a, QUESTION], max_new_tokens=1).report.documents}
    assert found == {served.certificates[number].artifact_id for number in (0, 4)}


def test_documents_are_found_by_content_without_spans(engine, served):
    ids = flat([BOS], document(11, 81), served.documents[4], document(3, 82), served.documents[1], QUESTION)
    searched = engine.generate(token_ids=ids, max_new_tokens=2)
    assert [(d.start, d.length) for d in searched.report.documents] == [(12, 257), (272, 130)]
    spanned = engine.generate(token_ids=ids, spans=[(12, 269), Span(272, 402)], max_new_tokens=2)
    assert spanned.token_ids == searched.token_ids
    assert spanned.report.documents == searched.report.documents
    # Spans name the documents: what they do not name is not looked for.
    some = engine.generate(token_ids=ids, spans=[(12, 269)], max_new_tokens=1).report
    assert [(d.start, d.length) for d in some.documents] == [(12, 257)]
    none = engine.generate(token_ids=ids, spans=[], max_new_tokens=1).report
    assert none.reason is RequestReason.NOTHING_TO_REUSE


def test_parts_of_documents(engine, served):
    long = served.documents[4]
    report = engine.generate(segments=[long[64:224], long[128:], long[5:], QUESTION], max_new_tokens=1).report
    assert [d.reason for d in report.documents] == [None, None, None]
    assert [d.length for d in report.documents] == [160, 129, 252]
    # The third begins inside a block: its first 27 tokens are new text, counted with it.
    assert report.documents[2].recomputed >= 27 + 32 + 33


@pytest.mark.parametrize("name", REUSING)
def test_a_prompt_that_ends_in_a_document(served, name):
    """Exactly: with ids, and with an empty last segment; decode goes on behind it."""
    engine, a, b = served.engine(name), *served.documents[:2]
    result = engine.generate(segments=[a, b, ""], max_new_tokens=5, stop_at_eos=False)
    assert [d.reason for d in result.report.documents] == [None, None]
    assert len(result.token_ids) == 5
    same = engine.generate(token_ids=flat([BOS], a, b), max_new_tokens=5, stop_at_eos=False)
    assert same.token_ids == result.token_ids


@pytest.mark.parametrize("name", REUSING)
@pytest.mark.parametrize("bos", [True, False])
def test_a_prompt_that_is_a_document_only(served, name, bos):
    engine, ids = served.engine(name), served.documents[4]
    result = engine.generate(token_ids=[BOS, *ids] if bos else ids, max_new_tokens=5, stop_at_eos=False)
    assert result.report.arm == "reuse"
    assert len(result.token_ids) == 5
    (found,) = result.report.documents
    assert found.reused + found.recomputed == 257
    if not bos:  # an exact prefix: only what gives the first token runs
        picked = {"headsplit": 0, "turbo": 0}.get(name, int(0.15 * 257))
        assert 1 <= found.recomputed <= 1 + picked


def test_one_segment_is_searched(engine, served):
    report = engine.generate(segments=[flat(served.documents[0], QUESTION)], max_new_tokens=1).report
    assert [d.artifact_id for d in report.documents] == [served.certificates[0].artifact_id]


# One request says nothing about the next


def strip(result: Result) -> tuple[object, ...]:
    report = result.report
    return result.token_ids, report.counters, report.documents, report.reason, report.ledgers.arithmetic


def test_many_requests_through_one_engine_equal_fresh_ones(served):
    """State that leaks from one request to the next would show."""
    rng = np.random.default_rng(5)
    shared = Engine(served.checkpoint, served.store)
    for number in range(8):
        picked = rng.choice(5, size=int(rng.integers(1, 4)), replace=False)
        segments = [*(served.documents[i] for i in picked), document(int(rng.integers(1, 40)), number)]
        found = shared.generate(segments=segments, max_new_tokens=2)
        fresh = Engine(served.checkpoint, served.store).generate(segments=segments, max_new_tokens=2)
        assert strip(found) == strip(fresh)


def test_reuse_then_off_equals_a_server_that_never_reused(served):
    segments = [*served.documents[:3], QUESTION]
    server, never = Engine(served.checkpoint, served.store), Engine(served.checkpoint)
    server.generate(segments=segments, max_new_tokens=3)
    off = server.generate(segments=segments, reuse="off", max_new_tokens=3)
    assert strip(off) == strip(never.generate(segments=segments, reuse="off", max_new_tokens=3))
    assert off.report.arm == "dense"


def test_a_tenant_gains_nothing_from_another(served, tmp_path):
    """CVE-2025-46570: A has the document, B asks for it, A asks again."""
    store, segments = tmp_path / "store", [served.documents[4], QUESTION]
    publish(served.checkpoint, store, served.documents[4:], namespace="a")
    publish(served.checkpoint, store, served.documents[:1], namespace="b")
    a, b = (Engine(served.checkpoint, store, namespace=name) for name in "ab")
    assert a.generate(segments=segments, max_new_tokens=1).report.arm == "reuse"
    theirs = b.generate(segments=segments, max_new_tokens=1).report
    assert (theirs.arm, theirs.reused_tokens) == ("dense", 0)
    assert theirs.ledgers.token_rows.saved == theirs.ledgers.arithmetic.saved == 0
    assert a.generate(segments=segments, max_new_tokens=1).report.arm == "reuse"
    never = Engine(served.checkpoint, store, namespace="nobody")
    assert never.generate(segments=segments, max_new_tokens=1).report.reason is RequestReason.NOTHING_TO_REUSE


def test_documents_published_while_serving_are_found(served, tmp_path):
    store = tmp_path / "store"
    a, b = served.documents[1], served.documents[4]
    publish(served.checkpoint, store, [a])
    engine, segments = Engine(served.checkpoint, store), [a, b, QUESTION]

    def reasons() -> list[object]:
        return [d.reason for d in engine.generate(segments=segments, max_new_tokens=1).report.documents]

    assert reasons() == [None, DocumentReason.NO_MATCH]
    library = engine.library
    assert library is not None
    known = library.known
    assert reasons() == [None, DocumentReason.NO_MATCH]
    assert library.known is known  # made when the store changes, not by every request
    publish(served.checkpoint, store, [b])
    assert reasons() == [None, None]
    assert [len(now) for now in (known, library.known)] == [1, 2]
    from redknot.artifact.store import ArtifactStore

    with ArtifactStore(store) as opened:
        opened.remove(opened.list()[0].artifact_id, "default")
    assert reasons() == [DocumentReason.NO_MATCH, None]


# The report


@pytest.mark.parametrize("name", REUSING)
def test_the_report_counts_what_ran(served, name):
    engine = served.engine(name)
    segments = [*served.documents[:2], document(5, 3), served.documents[4], QUESTION]
    report = engine.generate(segments=segments, max_new_tokens=4).report
    total, geometry = report.prompt_tokens, served.model.geometry
    assert total == 1 + sum(map(len, segments))
    assert report.profile_digest == engine.profile.digest()
    saved = recompute_row_layers(geometry, total) - report.counters.row_layers
    assert report.ledgers.token_rows.saved == saved
    assert (saved > 0) == (name != "headsplit")
    assert report.ledgers.arithmetic.whole - report.ledgers.arithmetic.saved == report.counters.flops
    assert report.bounds is not None
    ran = recompute_row_layers(geometry, total) / report.counters.row_layers
    assert report.bounds.row_bound == pytest.approx(ran)
    assert 0 < report.ledgers.head_rows.share <= report.bounds.head_row_ceiling
    assert 0 < report.ttft_forward_s <= report.ttft_request_s
    assert {"match_s", "certify_s", "ttft_forward_s", "ttft_request_s"} <= report.ledgers.wall_clock.keys()
    body = json.loads(json.dumps(report.to_dict()))
    assert (body["arm"], body["reason"], body["prompt_tokens"]) == ("reuse", None, total)
    assert [found["reused"] for found in body["documents"]] == [found.reused for found in report.documents]
    assert "cuts" not in body["counters"]
    assert body["bounds"] == {
        "row_bound": report.bounds.row_bound,
        "head_row_ceiling": structural_ceiling(geometry, engine.profile),
    }


def test_certificates_are_counted_once_per_request_and_artifact(served):
    engine = Engine(served.checkpoint, served.store)
    segments = [served.documents[0], served.documents[1], served.documents[0], QUESTION]
    for count in (2, 4):
        engine.generate(segments=segments, max_new_tokens=1)
        assert engine.metrics.registry.get_sample_value("redknot_certificates_validated_total") == count


def test_counts_of_the_store_and_of_the_index_are_scraped(served):
    engine = Engine(served.checkpoint, served.store)
    library = engine.library
    assert library is not None
    assert samples(engine.metrics)["redknot_store_loads_total"] == 0
    engine.generate(segments=[*served.documents[:2], QUESTION], max_new_tokens=1)
    library.index.counters["match_collisions"] += 7
    found = samples(engine.metrics)
    assert found["redknot_store_loads_total"] == 2
    assert found["redknot_index_match_collisions_total"] == 7
    assert found["redknot_index_match_cut_short_total"] == 0
    for name, count in library.store.counters.items():
        assert found[f"redknot_store_{name}_total"] == count
    assert found["redknot_store_bytes_verified_total"] > 0


def test_generation_stops_at_the_end_of_sequence(served, tmp_path):
    plain = Engine(served.checkpoint)
    tokens = plain.generate(token_ids=QUESTION, max_new_tokens=5, stop_at_eos=False).token_ids
    stopping = write_checkpoint(tmp_path / "stopping", eos_token_id=[1, tokens[2]])
    engine = Engine(stopping)
    assert engine.generate(token_ids=QUESTION, max_new_tokens=5).token_ids == tokens[: tokens.index(tokens[2])]
    assert engine.generate(token_ids=QUESTION, max_new_tokens=5, stop_at_eos=False).token_ids == tokens


def test_what_ran_decides_whether_it_was_reuse(served, monkeypatch):
    """Whatever the plan said: a prefill in which every row ran is no reuse, and its request runs dense."""
    engine = served.engine()
    segments = [*served.documents[:2], QUESTION]

    def every_row(model, session, runs, token_ids, profile, counters):
        nothing = torch.zeros(session.length, dtype=torch.bool)
        return Rows(session.length, nothing, nothing)

    monkeypatch.setattr(engine_module, "choose_rows", every_row)
    monkeypatch.setattr(engine, "profile", engine.profile.model_copy(update={"middle_idle": Treatment.FULL}))
    monkeypatch.setattr(type(engine.profile), "reuses", True)
    found = engine.generate(segments=segments, max_new_tokens=4)
    assert (found.report.arm, found.report.reason) == ("dense", RequestReason.NOTHING_TO_REUSE)
    assert "ran every row again" in found.report.detail
    assert found.report.reused_tokens == 0
    assert found.token_ids == served.engine().generate(segments=segments, reuse="off", max_new_tokens=4).token_ids


def test_several_threads_share_an_engine(served):
    """From the first request on, while the index is still empty."""
    engine, segments = served.engine(), [*served.documents[:2], QUESTION]
    expected = served.engine().generate(segments=segments, max_new_tokens=2)
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(engine.generate, segments=segments, max_new_tokens=2) for _ in range(12)]
        found = [job.result() for job in jobs]
    assert {result.token_ids for result in found} == {expected.token_ids}
    assert {(result.report.arm, result.report.reused_tokens) for result in found} == {
        ("reuse", expected.report.reused_tokens)
    }


def test_a_store_that_may_not_be_opened_is_a_reason(served):
    """A name that no file system holds: the same for every user, root too."""
    engine = Engine(served.checkpoint, "x" * 300)
    report = engine.generate(segments=[served.documents[0], QUESTION], max_new_tokens=1).report
    assert (report.arm, report.reason) == ("dense", RequestReason.STORE_UNAVAILABLE)
    assert "ENAMETOOLONG" in report.detail
