"""What is sent, and what streams of events come to: counts that differ, cut streams and errors never pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.encoded import Encoded
from eval.engines.wire import Request, ServerError, Stream, parsed, refusal, shown
from tests.kit.fakesglang import events_of, in_report, last

PROMPT = Encoded(np.arange(9, dtype=np.int32), ((1, 4), (4, 8)))


def request(length: int = 3, **options: Any) -> Request:
    return Request(PROMPT, {"reuse": "auto", "profile": "turbo"}, length, "key", **options)


def read(asked: Request, events: Sequence[dict[str, Any]], done: bool = True) -> Stream:
    stream = Stream(asked, 10.0)
    for number, event in enumerate(events):
        stream.feed(f"data: {json.dumps(event)}", 11.0 + number)
        stream.feed("", 11.0 + number)
    if done:
        stream.feed("data: [DONE]", 99.0)
    return stream


def events(asked: Request) -> list[dict[str, Any]]:
    return events_of(json.loads(asked.body))


def test_what_is_sent():
    body = json.loads(request(exact=True).body)
    assert body["input_ids"] == list(range(9))
    assert body["extra_key"] == "key"
    assert body["stream"] is True
    sampling = body["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["temperature"], sampling["ignore_eos"]) == (3, 0, True)
    assert sampling["custom_params"]["redknot"] == {"reuse": "auto", "profile": "turbo", "spans": [[1, 4], [4, 8]]}
    assert request().sent_sha256 == PROMPT.sha256
    assert json.loads(request().body)["sampling_params"]["ignore_eos"] is False


def test_an_answer():
    asked = request()
    reply = read(asked, events(asked)).reply("digest")
    assert reply.token_ids == (9, 9, 9)
    assert reply.text == " word word word"
    assert reply.ttft_request_s == 1.0
    assert reply.ttft_forward_s == 0.001
    assert reply.prompt_sha256 == PROMPT.sha256
    assert (reply.max_new_tokens, reply.checkpoint) == (3, "digest")


def test_times_are_those_of_tokens():
    asked = request()
    empty = {"text": "", "output_ids": [], "meta_info": {}}
    stream = read(asked, [empty, *events(asked)])
    assert (stream.first, stream.last) == (12.0, 14.0)


def test_the_token_that_ends_an_answer_is_no_part_of_it():
    asked = request()
    found = last(finish_reason={"type": "stop", "matched": 9})({}, events(asked))
    assert read(asked, found).reply("").token_ids == (9, 9)


@given(st.integers(0, 3), st.booleans())
def test_a_cut_stream_is_an_error(kept, done):
    asked = request()
    stream = read(asked, events(asked)[:kept], done)
    if kept == 3 and done:
        stream.reply("")
        return
    with pytest.raises(ServerError, match=f"cut after {kept} tokens|no report"):
        stream.reply("")


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (last(prompt_tokens=8), "unequal tokens: 9 were sent, it counts 8"),
        (in_report(prompt_tokens=10), "unequal tokens: 9 were sent, its report counts 10"),
        (last(completion_tokens=4), "unequal tokens: 3 came, it counts 4"),
        (last(cached_tokens=5), "a prefix advantage: 5 tokens"),
        (in_report(cached_tokens=6), "a prefix advantage: 6 tokens"),
        (last(redknot=None), "no report"),
        (last(redknot=[1]), "no report"),
        (last(finish_reason={"type": "abort", "message": "no\nmemory"}), "gave up: no memory"),
    ],
)
def test_lies_are_errors(lie, message):
    asked = request()
    stream = read(asked, lie({}, events(asked)))
    with pytest.raises(ServerError, match=message):
        stream.reply("")


def test_tokens_from_the_prefix_cache_are_the_prefix_arms_own():
    asked = request(shares=True)
    assert read(asked, last(cached_tokens=5)({}, events(asked))).reply("").token_ids


@pytest.mark.parametrize(("came", "exact", "fails"), [(2, False, False), (2, True, True), (4, False, True)])
def test_the_length_of_answers(came, exact, fails):
    asked, other = request(exact=exact), request(came)
    stream = read(asked, events(other))
    if fails:
        with pytest.raises(ServerError, match=f"unequal tokens: {came} came, 3 were asked for"):
            stream.reply("")
    else:
        assert len(stream.reply("").token_ids) == came


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('data: {"error": {"message": "it broke", "code": 500}}', "the server failed: it broke"),
        ('data: {"error": "it broke"}', "the server failed: it broke"),
        ("data: [1]", "else than a JSON object"),
        ("data: {", "else than a JSON object"),
        ('data: {"output_ids": 3}', "no list of tokens"),
        ("<html>", "else than events: <html>"),
    ],
)
def test_lines_that_are_no_events(line, message):
    with pytest.raises(ServerError, match=message):
        Stream(request(), 0.0).feed(line, 1.0)


@given(st.text(max_size=400))
def test_any_line_is_read_or_refused(text):
    stream = Stream(request(), 0.0)
    for line in (text, f"data: {text}"):
        with suppress(ServerError):
            stream.feed(line, 1.0)


def test_messages_of_refusals():
    assert str(refusal(500, '{"error": {"message": "full"}}')) == "the server answered 500: full"
    assert str(refusal(400, '{"message": "bad"}')) == "the server answered 400: bad"
    assert str(refusal(502, "<html>\n</html>")) == "the server answered 502: <html> </html>"
    assert len(shown("x" * 10_000)) < 310
    with pytest.raises(ServerError):
        parsed("3")
