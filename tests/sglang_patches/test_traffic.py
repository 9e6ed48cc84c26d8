"""What goes through the process that speaks HTTP: wishes are checked, namespaces stamped, reports flattened."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches import traffic
from sglang_patches.launch import ATTRIBUTE
from sglang_patches.options import ServerConfig
from sglang_patches.requests import ARRIVED, NAMESPACE

OPTIONS = SimpleNamespace(config=ServerConfig(namespace="default"), geometry=SimpleNamespace(vocab_size=2048))
MANAGER = SimpleNamespace(server_args=SimpleNamespace(**{ATTRIBUTE: OPTIONS}))
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=4), lambda v: st.lists(v, max_size=3))


def received(params: Any = None, **changes: Any) -> Any:
    fields = {"sampling_params": params, "return_logprob": False, "logprob_start_len": None}
    return SimpleNamespace(**fields | changes)


def http(namespace: str | None) -> Any:
    return SimpleNamespace(scope={} if namespace is None else {NAMESPACE: namespace})


def through(one: Any, request: Any = None, outputs: list[Any] | None = None) -> list[Any]:
    """What a client gets of a request."""

    async def original(manager: Any, received: Any, request: Any) -> AsyncIterator[Any]:
        assert (manager, received) == (MANAGER, one)
        for output in outputs or []:
            yield output

    async def collect() -> list[Any]:
        return [output async for output in traffic.generate(original, MANAGER, one, request)]

    return asyncio.run(collect())


@pytest.mark.parametrize(
    ("request_", "namespace"), [(None, "default"), (http(None), "default"), (http("mine"), "mine")]
)
def test_every_request_gets_its_namespace(request_, namespace):
    one = received(None)
    through(one, request_)
    assert one.sampling_params["custom_params"][NAMESPACE] == namespace
    assert 0 <= time.perf_counter() - one.sampling_params["custom_params"][ARRIVED] < 60
    assert set(one.sampling_params["custom_params"]) == {NAMESPACE, ARRIVED}


@given(forged=JSON, batch=st.booleans())
def test_no_client_can_set_a_namespace_or_when_it_came(forged, batch):
    params = {"temperature": 0, "custom_params": {NAMESPACE: forged, ARRIVED: forged, "other": 1}}
    one = received([params, {}] if batch else params)
    through(one, http("mine"))
    found = one.sampling_params if batch else [one.sampling_params]
    assert [params["custom_params"][NAMESPACE] for params in found] == ["mine"] * len(found)
    assert found[0]["custom_params"]["other"] == 1
    assert isinstance(found[0]["custom_params"][ARRIVED], float)
    assert params["custom_params"][NAMESPACE] == forged  # the client's own object is not written to


@pytest.mark.parametrize(
    ("custom", "said"),
    [
        ([], "custom_params must be an object"),
        ("reuse", "custom_params must be an object"),
        ({"redknot": "off"}, "redknot must be an object, not str"),
        ({"redknot": {"reuse": "often"}}, "redknot.reuse must be one of"),
        ({"redknot": {"namespace": "other"}}, "redknot has no field namespace"),
        ({"redknot": {"spans": 3}}, "redknot.spans"),
    ],
)
def test_a_malformed_wish_is_a_bad_request(custom, said):
    for params in ({"custom_params": custom}, [{}, {"custom_params": custom}]):
        with pytest.raises(ValueError, match=said):
            through(received(params))


@pytest.mark.parametrize(
    ("wanted", "start", "refused"),
    [
        (True, 0, True),
        (True, 5, True),
        (True, [-1, 3], True),
        ([True, False], [0, -1], True),
        (True, -1, False),
        (True, None, False),
        (True, [-1, None], False),
        (False, 0, False),
        (None, 0, False),
    ],
)
def test_logprobs_of_the_prompt_are_refused(wanted, start, refused):
    one = received(return_logprob=wanted, logprob_start_len=start)
    if refused:
        with pytest.raises(ValueError, match="logprobs of the prompt cannot be had"):
            through(one)
    else:
        through(one)


@pytest.mark.parametrize(("name", "meaning"), traffic._REFUSED.items())
def test_what_skipped_rows_would_falsify_is_refused(name, meaning, installed):
    assert name in installed.requests
    with pytest.raises(ValueError, match=f"^{meaning} cannot be had with --enable-redknot$"):
        through(received(**{name: [1]}))
    for nothing in (None, False, []):
        through(received(**{name: nothing}))


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"top_logprobs_num": 2048, "token_ids_logprob": [0, 2047]}, False),
        ({"top_logprobs_num": [0, None, 5], "token_ids_logprob": [[5], None]}, False),
        ({"top_logprobs_num": 2049}, True),
        ({"top_logprobs_num": [0, -1]}, True),
        ({"token_ids_logprob": [2048]}, True),
        ({"token_ids_logprob": [[5], [-1]]}, True),
    ],
)
def test_logprobs_of_tokens_that_there_are_not_are_refused(fields, refused):
    one = received(**fields)
    if refused:
        with pytest.raises(ValueError, match="the model has 2048 tokens"):
            through(one)
    else:
        through(one)


def test_requests_that_generate_nothing_are_left_to_sglang():
    """EmbeddingReqInput has sampling parameters, and neither field of logprobs."""
    assert through(SimpleNamespace(sampling_params=None), None, [{"a": 1}]) == [{"a": 1}]
    assert through(SimpleNamespace(text="a"), None, [{"a": 1}]) == [{"a": 1}]


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        ([None, None, {"arm": "reuse"}], {"arm": "reuse"}),
        ([{"arm": "reuse"}, {"arm": "dense"}], {"arm": "reuse"}),
        ([None], None),
        ([], None),
        ({"arm": "reuse"}, {"arm": "reuse"}),
    ],
)
def test_a_report_is_one_object(sent, got):
    item = {"meta_info": {"redknot": sent}, "text": "x"}
    [batch] = through(received(), None, [[item, {"meta_info": {}}, {"meta_info": None}, {"error": 1}]])
    assert batch[0]["meta_info"]["redknot"] == got


def test_metadata_of_a_response():
    returned = [{"meta_info": {"redknot": {"arm": "reuse"}}}, {"meta_info": {}}]
    for keywords in ({}, {"created": 1}):
        positional = () if keywords else (1,)
        result = SimpleNamespace(metadata={"weight_version": "default"})
        traffic.add_to_metadata(result, object(), object(), returned, *positional, **keywords)
        assert result.metadata == {"weight_version": "default", "redknot": [{"arm": "reuse"}, None]}
    for result in (None, object(), SimpleNamespace(metadata=None)):
        assert traffic.add_to_metadata(result, object(), object(), returned) is result


def event(**fields: Any) -> str:
    return f"data: {json.dumps({'id': 'i', 'object': 'chunk', 'created': 7, 'model': 'nano'} | fields)}\n\n"


DONE = "data: [DONE]\n\n"


async def streamed(lines: list[str], outputs: list[Any]) -> list[str]:
    """A stream whose generator takes its outputs from the hooked tokenizer manager, as SGLang's does."""

    async def tokens(*_: Any) -> AsyncIterator[Any]:
        for output in outputs:
            yield output

    async def original(handler: Any, adapted: Any, request: Any, raw: Any) -> AsyncIterator[str]:
        async for _ in traffic.generate(tokens, MANAGER, adapted, raw):
            pass
        for line in lines:
            yield line

    return [line async for line in traffic.stream(original, object(), received(), object(), None)]


def output(index: int | None, arm: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"meta_info": {} if arm is None else {"redknot": [None, {"arm": arm}]}}
    return found if index is None else found | {"index": index}


def test_reports_come_in_front_of_the_end():
    lines = [": comment\n\n", event(choices=[1]), event(choices=[], usage={}), DONE]
    got = asyncio.run(streamed(lines, [output(0, "reuse"), output(0, None)]))
    assert got[:3] + got[4:] == lines
    assert json.loads(got[3].removeprefix("data: ")) == {
        "id": "i",
        "object": "chunk",
        "created": 7,
        "model": "nano",
        "choices": [],
        "metadata": {"redknot": [{"arm": "reuse"}]},
    }
    assert got[3].endswith("\n\n")


def test_choices_that_end_out_of_order_have_their_reports_in_order():
    got = asyncio.run(streamed([event(), DONE], [output(1, "dense"), output(0, "reuse")]))
    assert json.loads(got[1].removeprefix("data: "))["metadata"]["redknot"] == [{"arm": "reuse"}, {"arm": "dense"}]


@pytest.mark.parametrize(
    "lines", [[DONE], ["data: {broken\n\n", DONE], ['data: {"error": 1}\n\n', DONE], ["data: 3\n\n"]]
)
def test_a_stream_that_failed_stays_as_it_is(lines):
    assert asyncio.run(streamed(lines, [])) == lines


def test_streams_at_one_time_keep_their_reports_apart():
    async def both() -> list[list[str]]:
        return await asyncio.gather(
            streamed([event(), DONE], [output(0, "reuse")]), streamed([event(), DONE], [output(0, "dense")])
        )

    arms = [json.loads(got[1].removeprefix("data: "))["metadata"]["redknot"] for got in asyncio.run(both())]
    assert arms == [[{"arm": "reuse"}], [{"arm": "dense"}]]


def test_a_stream_that_its_client_left_is_closed_in_another_task():
    async def leave() -> None:
        async def original(*_: Any) -> AsyncIterator[str]:
            yield event()
            yield DONE

        lines = traffic.stream(original, object(), received(), object(), None)
        await asyncio.create_task(anext(lines))
        await asyncio.create_task(lines.aclose())

    asyncio.run(leave())
