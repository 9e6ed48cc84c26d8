"""Prompts that nobody should send: a clear 400 or a right answer, and a server that stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.server.conftest import World
from tests.kit.requests import BOS, document
from tests.kit.server import Server

OFF = {"reuse": "off"}


@pytest.fixture(autouse=True)
def _the_server_stays_up(main: Server, world: World) -> Iterator[None]:
    yield
    ids = [BOS, *document(30, 800)]
    assert world.reference.wrong(ids, main.generate(ids, 4, OFF).ids) == []


def ask(main: Server, **body: Any) -> Any:
    sampling = {"max_new_tokens": 2, "temperature": 0} | body.pop("sampling_params", {})
    return main.call("POST", "/generate", json={"sampling_params": sampling} | body)


@pytest.mark.parametrize(
    "prompt",
    [{"text": ""}, {"input_ids": []}, {"text": []}, {"input_ids": [[]]}, {"text": ["Hello", ""]}, {}, {"text": None}],
    ids=str,
)
def test_nothing_is_refused_or_answered(main: Server, prompt: dict[str, Any]):
    """vllm#20485, mlx-lm#798."""
    response = ask(main, **prompt)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 200:  # BOS alone
        found = response.json()
        for one in found if isinstance(found, list) else [found]:
            assert one["meta_info"]["prompt_tokens"] >= 1
    else:
        assert response.json()["error"]["message"]


@pytest.mark.parametrize("text", [" ", "\n", "a", "\t \n", "\u00a0", "字", "🦊", "\x00", "<|bos|>", "<|eos|><|pad|>"])
def test_next_to_nothing_is_answered(main: Server, text: str):
    response = ask(main, text=text)
    assert response.status_code == 200, response.text
    assert response.json()["meta_info"]["redknot"]["arm"] == "dense"


def test_empty_prompts_among_others(main: Server, world: World):
    ids = [BOS, *document(20, 801)]
    response = ask(main, input_ids=[ids, [], ids])
    assert response.status_code == 400, response.text
    for prompt in ("", [], [""], ["Hello", ""]):
        response = main.call("POST", "/v1/completions", json={"model": main.model, "prompt": prompt, "max_tokens": 2})
        assert response.status_code in (200, 400), response.text
    for messages in ([], [{"role": "user", "content": ""}], [{"role": "user"}], [{"role": "nobody", "content": "x"}]):
        body = {"model": main.model, "messages": messages, "max_tokens": 2}
        response = main.call("POST", "/v1/chat/completions", json=body)
        assert response.status_code in (200, 400, 422), response.text


@pytest.mark.parametrize("ids", [[2048], [-1], [5, 10**12], [1.5], ["a"], [None], [[1], 2], [True, False]], ids=str)
def test_ids_that_are_none(main: Server, ids: list[Any]):
    response = ask(main, input_ids=ids)
    wanted = (200, 400, 422) if ids == [True, False] else (400, 422)
    assert response.status_code in wanted, response.text


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(main: Server, world: World):
    """sglang#8096: never cut."""
    ids = [BOS, *[token for name in sorted(world.texts) for token in world.documents[name]]]
    assert len(ids) > 8000
    for one in (ids, ids[:4096], ids[:4097]):
        message = main.refused("/generate", main.body(one, 2))
        assert str(len(one)) in message
        assert "4096" in message
    completion = {"model": main.model, "prompt": ids, "max_tokens": 2}
    message = main.refused("/v1/completions", completion)
    assert str(len(ids)) in message
    assert "4096" in message
    content = "".join(world.texts[name] for name in sorted(world.texts))
    talk = {"model": main.model, "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    assert "4096" in main.refused("/v1/chat/completions", talk)


def test_the_longest_prompt_that_fits_is_answered(main: Server, world: World):
    main.flush()
    ids = [BOS, *[token for name in sorted(world.texts)[:8] for token in world.documents[name]]][:4084]
    answer = main.generate(ids, 5)
    assert len(answer.ids) == 5
    assert answer.report["prompt_tokens"] == len(ids)
    assert answer.report["reused_tokens"] > 2000


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": -1},
        {"max_new_tokens": 10**9},
        {"temperature": -1},
        {"n": 0},
        {"top_p": 7},
        {"top_k": 10**9},
        {"repetition_penalty": 0},
        {"logit_bias": {"1000000": 1}},
        {"logit_bias": {"-1": 1}},
        {"stop_token_ids": [10**9, -1]},
        {"min_new_tokens": 10**9},
        {"regex": "("},
        {"json_schema": "{"},
        {"regex": "[0-9]+"},
        {"custom_params": [1]},
        {"custom_params": "x"},
        {"custom_params": {"redknot_namespace": 5}},
        {"custom_params": {"redknot_namespace": {"a": 1}}},
    ],
    ids=str,
)
def test_odd_sampling_parameters(main: Server, sampling: dict[str, Any]):
    response = ask(main, text="Hello you", sampling_params=sampling)
    assert response.status_code in (200, 400, 422), response.text


def test_bodies_that_are_no_requests(main: Server):
    for body in (b"", b"{", b"[]", b"null", b'{"text": 5}', b'{"text": {"a": 1}}', b"\xff\xfe"):
        response = main.call("POST", "/generate", data=body, headers={"Content-Type": "application/json"})
        assert 400 <= response.status_code < 500, (body, response.status_code, response.text)
    body = {"text": "Hello", "sampling_params": [{"custom_params": {"redknot": {"x": 1}}}]}
    assert main.call("POST", "/generate", json=body).status_code == 400


def test_embeddings_instead_of_tokens_are_refused(main: Server):
    """The model would not see them."""
    response = ask(main, input_embeds=[[0.1] * 128] * 4)
    assert response.status_code == 400, response.text


@pytest.mark.parametrize(
    "body",
    [
        {"return_hidden_states": True},
        {"lora_path": "x"},
        {"custom_logit_processor": "x"},
        {"image_data": "data:image/png;base64,AAAA"},
        {"token_ids_logprob": [5, 10**6], "return_logprob": True},
        {"token_ids_logprob": [5, -(10**6)], "return_logprob": True},
        {"token_ids_logprob": [5], "return_logprob": True},
        {"top_logprobs_num": 10**6, "return_logprob": True},
        {"top_logprobs_num": -1, "return_logprob": True},
        {"top_logprobs_num": 2048, "return_logprob": True},
        {"session_params": {"id": "none"}},
        {"return_routed_experts": True},
        {"bootstrap_host": "127.0.0.1", "bootstrap_room": 5},
        {"positional_embed_overrides": [1]},
        {"priority": 10**9},
        {"extra_key": "x" * 100000, "cache_salt": "y"},
        {"rid": "HEALTH_CHECK_of_mine"},
    ],
    ids=lambda body: str(body)[:60],
)
def test_what_other_models_can_do(main: Server, body: dict[str, Any]):
    response = ask(main, text="Hello you", **body)
    assert response.status_code in (200, 400, 422), response.text[:500]


def test_one_request_id_for_two_requests(main: Server, world: World):
    """The second may be refused; it must not change the first, nor what comes behind."""
    one, two = [BOS, *document(100, 810)], [BOS, *document(90, 811)]
    for _ in range(3):
        first, second = main.generate(one, 3, OFF, rid="same"), main.generate(two, 3, OFF, rid="same")
        assert world.reference.wrong(one, first.ids) == []
        assert world.reference.wrong(two, second.ids) == []
    main.at_rest()
