"""Without reuse the server answers as ``transformers`` does; the prefix cache, logprobs and endings are right."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.server.conftest import World
from tests.e2e.server.reference import FILE, LENGTH, checkpoint_hash, prompts
from tests.kit.requests import BOS, document
from tests.kit.server import Answer, Server, answer_of, differs

OFF = {"reuse": "off"}
PAGE = 32


def check(asked: list[list[int]], answers: list[Answer]) -> None:
    """Token for token as transformers; rows that are as good as a tie end the comparison, and are few."""
    known = json.loads(FILE.read_text(encoding="utf-8"))
    assert known["weights"] == checkpoint_hash(), "nano is another one: python -m tests.e2e.server.reference"
    ties = 0
    for number, (ids, answer, wanted) in enumerate(zip(asked, answers, known["answers"], strict=True)):
        assert not differs(answer.ids, wanted["margins"], wanted["answer"]), f"prompt {number} of {len(ids)} tokens"
        ties += answer.ids != wanted["answer"]
    print(f"{ties} of {len(asked)} answers go another way at a tie")
    assert ties <= 2


def test_fifty_prompts_are_answered_as_transformers_does(main: Server):
    main.flush()
    asked = prompts()
    assert len(asked) == 50
    answers = [main.generate(ids, LENGTH, OFF) for ids in asked]
    check(asked, answers)
    for ids, answer in zip(asked, answers, strict=True):
        assert answer.report["arm"] == "dense"
        assert answer.report["reason"] == "reuse_off"
        assert answer.cached == answer.report["cached_tokens"]
        assert answer.report["forwarded_rows"] == len(ids) - answer.cached
        assert answer.meta["prompt_tokens"] == len(ids)
        assert answer.meta["completion_tokens"] == LENGTH


def test_fifty_prompts_sixteen_at_a_time_are_too(main: Server):
    main.flush()
    asked = prompts()
    check(asked, main.together([main.body(ids, LENGTH, OFF) for ids in asked]))


def test_a_prefix_that_was_computed_is_not_computed_again(main: Server, world: World):
    main.flush()
    for seed, length in enumerate((33, 64, 65, 200)):
        ids = [BOS, *document(length - 1, 300 + seed)]
        first = main.generate(ids, 8, OFF)
        assert first.cached == first.report["cached_tokens"] == 0
        again = main.generate(ids, 8, OFF)
        assert again.cached == again.report["cached_tokens"] == (length - 1) // PAGE * PAGE
        assert again.report["forwarded_rows"] == length - again.cached
        assert again.report["ledgers"]["arithmetic"]["saved"] == 0
        assert not differs(again.ids, again.margins, first.ids)
        longer = [*ids, *document(45, 400 + seed)]
        other = main.generate(longer, 8, OFF)
        assert other.cached == other.report["cached_tokens"] == length // PAGE * PAGE
        assert other.report["forwarded_rows"] == len(longer) - other.cached
        assert world.reference.wrong(longer, other.ids) == []


def test_an_answer_is_prefix_too(main: Server, world: World):
    main.flush()
    ids = [BOS, *document(39, 310)]
    first = main.generate(ids, 60, OFF)
    turn = [*ids, *first.ids, *document(20, 311)]
    second = main.generate(turn, 8, OFF)
    assert second.cached == second.report["cached_tokens"] == (len(ids) + 60 - 1) // PAGE * PAGE
    assert world.reference.wrong(turn, second.ids) == []


def test_logprobs_of_an_answer_are_those_of_its_logits(main: Server, world: World):
    import torch

    ids = [BOS, *document(70, 320)]
    answer = main.generate(ids, 6, OFF)
    found = [pair[0] for pair in answer.meta["output_token_logprobs"]]
    with torch.inference_mode():
        logits = world.reference.model(torch.tensor([[*ids, *answer.ids[:-1]]])).logits[0, len(ids) - 1 :]
    wanted = logits.float().log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0].tolist()
    assert found == pytest.approx(wanted, abs=1e-3)


def test_logprobs_of_a_prompt_are_refused(main: Server):
    ids = [BOS, *document(40, 321)]
    for start in (0, 5, [3]):
        body = main.body([ids] if isinstance(start, list) else ids, 2)  # type: ignore[arg-type]
        assert "logprobs of the prompt" in main.refused("/generate", body | {"logprob_start_len": start})
    completion = {"model": main.model, "prompt": ids, "max_tokens": 2, "echo": True, "logprobs": 1}
    assert "logprobs of the prompt" in main.refused("/v1/completions", completion)


def test_completions_may_have_logprobs(main: Server):
    found = main.client.completions.create(
        model=main.model, prompt=document(30, 322), max_tokens=3, temperature=0, logprobs=2
    )
    assert len(found.choices[0].logprobs.token_logprobs) == 3


def test_stop_strings_end_an_answer(main: Server, world: World):
    text = world.texts["document-00"][:400]
    whole = main.generate(text, 24, OFF)
    words = whole.text.split()
    assert len(words) > 3
    stop = words[2]
    found = main.generate(text, 24, OFF, sampling={"stop": [stop]})
    assert found.text == whole.text[: whole.text.index(stop)]
    assert found.meta["finish_reason"] == {"type": "stop", "matched": stop}
    token = whole.ids[4]
    found = main.generate(text, 24, OFF, sampling={"stop_token_ids": [token], "ignore_eos": False})
    assert found.meta["finish_reason"] == {"type": "stop", "matched": token}
    assert found.ids == whole.ids[: whole.ids.index(token) + 1]


def test_usage_counts(main: Server):
    main.flush()
    ids = [BOS, *document(99, 330)]
    for cached in (0, 96):
        found = main.client.completions.create(
            model=main.model,
            prompt=ids,
            max_tokens=7,
            temperature=0,
            extra_body={"ignore_eos": True, "custom_params": {"redknot": OFF}},
        )
        assert found.usage.prompt_tokens == 100
        assert found.usage.completion_tokens == 7
        assert found.usage.total_tokens == 107
        assert found.metadata["redknot"][0]["cached_tokens"] == cached


def test_a_list_of_prompts_and_several_answers_to_each(main: Server, world: World):
    asked = [[BOS, *document(length, 340)] for length in (5, 40, 77)]
    found = [answer_of(item) for item in main.post("/generate", main.body(asked, 6, OFF))]  # type: ignore[arg-type]
    assert len(found) == 3
    for ids, answer in zip(asked, found, strict=True):
        assert world.reference.wrong(ids, answer.ids) == []
        assert answer.report["prompt_tokens"] == len(ids)
    several = main.client.completions.create(
        model=main.model,
        prompt=asked,
        n=2,
        max_tokens=6,
        temperature=0.8,
        extra_body={"custom_params": {"redknot": OFF}},
    )
    assert [choice.index for choice in several.choices] == list(range(6))
    reports = several.metadata["redknot"]
    assert [report["prompt_tokens"] for report in reports] == [6, 6, 41, 41, 78, 78]
    assert several.usage.prompt_tokens == 6 + 41 + 78


def test_requests_are_ended_by_their_clients(main: Server, world: World):
    main.flush()
    ids = [BOS, *document(50, 350)]
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(main.call, "POST", "/generate", json=main.body(ids, 2000, OFF, rid="to-abort"))
        while main.health()["requests"] == 0:
            assert not long.done()
        main.call("POST", "/abort_request", json={"rid": "to-abort"})
        response = long.result(timeout=30)
    assert response.json()["meta_info"]["finish_reason"]["type"] == "abort"
    for place, event in enumerate(main.stream("/generate", main.body(ids, 2000, OFF))):
        assert event["meta_info"]["redknot"]["arm"] == "dense"
        if place == 2:
            break
    main.at_rest()
    answer = main.generate(ids, 8, OFF)
    assert world.reference.wrong(ids, answer.ids) == []


def test_streams_say_what_whole_answers_do(main: Server):
    ids = [BOS, *document(60, 360)]
    whole = main.generate(ids, 10, OFF)
    events = list(main.stream("/generate", main.body(ids, 10, OFF)))
    assert events[-1]["text"] == whole.text
    assert events[-1]["meta_info"]["redknot"]["prompt_tokens"] == 61
    common = {"model": main.model, "temperature": 0, "max_tokens": 10, "stream": True}
    extra = {"ignore_eos": True, "custom_params": {"redknot": OFF}}
    options = {"include_usage": True}
    parts = list(main.client.completions.create(**common, prompt=ids, extra_body=extra, stream_options=options))
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.text
    assert [part.usage.completion_tokens for part in parts if part.usage] == [10]
    reports = [part.metadata["redknot"] for part in parts if getattr(part, "metadata", None)]
    assert [[one["reason"] for one in found] for found in reports] == [["reuse_off"]]
    talk = {"messages": [{"role": "user", "content": "Where is the guard?"}], "extra_body": extra}
    said = main.client.chat.completions.create(**(common | {"stream": False}), **talk)
    parts = list(main.client.chat.completions.create(**common, **talk))
    deltas = [part.choices[0].delta.content or "" for part in parts if part.choices]
    assert "".join(deltas) == said.choices[0].message.content
    reports = [part.metadata["redknot"] for part in parts if getattr(part, "metadata", None)]
    assert len(reports) == 1
    assert reports[0][0]["prompt_tokens"] == said.usage.prompt_tokens
