"""Known documents in prompts of every endpoint: found, skipped physically, reported, and never in an exact request."""

from __future__ import annotations

import random
from typing import Any

import pytest

from redknot.artifact.needs import parse_strategy
from redknot.model.profile import SHIPPED
from tests.e2e.server.conftest import SEAMS, World
from tests.kit.requests import BLOCK, BOS, document, publish
from tests.kit.server import Answer, Server, differs

OFF = {"reuse": "off"}
QUESTION = "\nQuestion: What does the guard carry?"


def embedded(world: World, ids: list[int], length: int, profile: str = "rowsparse", **more: Any) -> Any:
    """What the embedded engine says to the same request."""
    return world.engine(profile).generate(token_ids=ids, max_new_tokens=length, stop_at_eos=False, **more)


def same(answer: Answer, alone: Any) -> bool:
    """Whether the server answered as the embedded engine did, and reused as much."""
    assert answer.report["documents"] == alone.report.to_dict()["documents"]
    assert answer.report["reused_tokens"] == alone.report.reused_tokens
    return not differs(answer.ids, answer.margins, alone.token_ids)


def counts(report: dict[str, Any]) -> None:
    """Rows that ran are what is neither cached nor reused; documents add up."""
    assert report["forwarded_rows"] == report["prompt_tokens"] - report["cached_tokens"] - report["reused_tokens"]
    for one in report["documents"]:
        assert one["reused"] + one["recomputed"] + one["cached"] == one["length"]


def test_documents_are_found_in_every_endpoint(main: Server, world: World):
    main.flush()
    prompt = world.texts["document-01"] + world.texts["document-02"] + QUESTION
    ids = [BOS, *world.engine().tokenizer.encode(prompt).tolist()]
    alone = embedded(world, ids, 8)
    for given in (prompt, ids):
        main.flush()
        answer = main.generate(given, 8)
        assert answer.report["arm"] == "reuse"
        assert answer.report["reused_tokens"] > 700
        assert answer.meta["prompt_tokens"] == len(ids)
        counts(answer.report)
        assert same(answer, alone)
    main.flush()
    extra = {"ignore_eos": True}
    found = main.client.completions.create(
        model=main.model, prompt=prompt, max_tokens=8, temperature=0, extra_body=extra
    )
    report = found.metadata["redknot"][0]
    assert report["reused_tokens"] == alone.report.reused_tokens
    assert found.choices[0].text == answer.text
    assert found.usage.prompt_tokens == len(ids)
    counts(report)
    main.flush()
    talk = main.client.chat.completions.create(
        model=main.model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=8,
        temperature=0,
        extra_body=extra,
    )
    report = talk.metadata["redknot"][0]
    assert report["arm"] == "reuse"
    assert report["reused_tokens"] == alone.report.reused_tokens
    assert talk.usage.prompt_tokens == report["prompt_tokens"]
    counts(report)


def test_reports_come_at_the_end_of_streams_too(main: Server, world: World):
    prompt = world.texts["document-03"] + world.texts["document-04"] + QUESTION
    main.flush()
    whole = main.generate(prompt, 6)
    reused = whole.report["reused_tokens"]
    assert reused > 0
    main.flush()
    for event in main.stream("/generate", main.body(prompt, 6)):
        assert event["meta_info"]["redknot"]["reused_tokens"] == reused
    common = {"model": main.model, "max_tokens": 6, "temperature": 0, "stream": True}
    body = {"ignore_eos": True}
    main.flush()
    parts = list(main.client.completions.create(**common, prompt=prompt, extra_body=body))
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.text
    assert not parts[-1].choices
    assert parts[-1].metadata["redknot"][0]["reused_tokens"] == reused
    messages = [{"role": "user", "content": prompt}]
    main.flush()
    parts = list(main.client.chat.completions.create(**common, messages=messages, extra_body=body))
    assert parts[-1].metadata["redknot"][0]["reused_tokens"] == reused
    main.flush()
    several = main.client.completions.create(**common, prompt=[prompt, "Hello"], n=2, extra_body=body)
    reports = list(several)[-1].metadata["redknot"]
    assert [report["arm"] for report in reports] == ["reuse", "reuse", "dense", "dense"]


def test_a_client_says_whether_to_reuse(main: Server, world: World):
    main.flush()
    ids = [BOS, *world.documents["document-05"], *document(20, 500)]
    auto = main.generate(ids, 4, {"reuse": "auto"})
    assert auto.report["arm"] == "reuse"
    required = main.generate(ids, 4, {"reuse": "required"})
    assert required.ids == auto.ids
    off = main.generate(ids, 4, OFF)
    assert (off.report["arm"], off.report["reason"]) == ("dense", "reuse_off")
    assert world.reference.wrong(ids, off.ids) == []
    body = main.body(document(50, 501), 4, {"reuse": "required"})
    assert "nothing_to_reuse" in main.refused("/generate", body)
    completion = {"model": main.model, "prompt": "Hello", "custom_params": {"redknot": {"reuse": "required"}}}
    assert "nothing_to_reuse" in main.refused("/v1/completions", completion)


def test_a_client_chooses_a_profile(main: Server, world: World):
    main.flush()
    ids = [BOS, *document(9, 510), *world.documents["document-06"], *world.documents["document-07"], 44, 45]
    sparse = main.generate(ids, 8)
    turbo = main.generate(ids, 8, {"profile": "turbo"})
    assert turbo.cached == 0  # what one profile left is not what another would
    assert turbo.report["profile"] == "turbo"
    assert same(sparse, embedded(world, ids, 8))
    assert same(turbo, embedded(world, ids, 8, "turbo"))
    assert "no profile" in main.refused("/generate", main.body(ids, 4, {"profile": "/etc/passwd"}))


def test_a_client_points_out_documents(main: Server, world: World):
    first, second = world.documents["document-08"], world.documents["document-09"]
    ids = [BOS, *first, *second, *document(20, 520)]
    spans = [[1, 1 + len(first)]]
    main.flush()
    answer = main.generate(ids, 8, {"spans": spans})
    assert len(answer.report["documents"]) == 1
    assert same(answer, embedded(world, ids, 8, spans=[(1, 1 + len(first))]))
    artifact = answer.report["documents"][0]["artifact_id"]
    named = main.generate(ids, 8, {"spans": [{"start": 1, "end": 1 + len(first), "artifact_id": artifact}]})
    assert named.ids == answer.ids
    wrong = {"start": 1, "end": 1 + len(first), "artifact_id": "0" * 64}
    assert main.generate(ids, 4, {"spans": [wrong]}).report["arm"] == "dense"
    for bad in ([[0, 5000]], [[5, 5]], [[-1, 5]], [[1, 40], [30, 60]], [[1]], "x", [{"start": 1}], [[1.5, 3]]):
        assert "span" in main.refused("/generate", main.body(ids, 4, {"spans": bad}))


@pytest.mark.parametrize(
    "wish",
    [{"reuze": "off"}, {"reuse": "maybe"}, {"reuse": None}, {"profile": 3}, {"spans": 3}, [1], "off", 0, True],
    ids=str,
)
def test_malformed_wishes_are_refused_everywhere(main: Server, wish: Any):
    custom = {"custom_params": {"redknot": wish}}
    generate = {"text": "Hello", "sampling_params": {"max_new_tokens": 2} | custom}
    assert "redknot" in main.refused("/generate", generate)
    assert "redknot" in main.refused("/generate", generate | {"text": ["Hello", "you"]})
    common = {"model": main.model, "max_tokens": 2} | custom
    assert "redknot" in main.refused("/v1/completions", common | {"prompt": "Hello"})
    talk = common | {"messages": [{"role": "user", "content": "Hello"}]}
    assert "redknot" in main.refused("/v1/chat/completions", talk)


def test_reuse_leaves_nothing_to_an_exact_request(main: Server, world: World):
    """vllm#44223."""
    main.flush()
    ids = [BOS, *world.documents["document-10"], *document(40, 530)]
    reused = main.generate(ids, 8)
    assert reused.report["arm"] == "reuse"
    exact = main.generate(ids, 8, OFF)
    assert exact.cached == 0
    assert exact.report["forwarded_rows"] == len(ids)
    assert world.reference.wrong(ids, exact.ids) == []
    longer = [*ids, *reused.ids, *document(9, 531)]
    exact = main.generate(longer, 8, OFF)
    assert exact.cached == len(ids) // 32 * 32  # of the exact request, not of the reusing one's answer
    assert world.reference.wrong(longer, exact.ids) == []


def test_the_same_reuse_again_runs_the_last_rows_alone(main: Server, world: World):
    main.flush()
    ids = [BOS, *document(5, 540), *world.documents["document-11"], *world.documents["seam-129"], *document(40, 541)]
    first, again = main.generate(ids, 8), main.generate(ids, 8)
    assert again.cached == again.report["cached_tokens"] == (len(ids) - 1) // 32 * 32
    counts(first.report)
    counts(again.report)
    assert not differs(again.ids, again.margins, first.ids)


def test_exact_prefixes_of_every_length_go_with_reuse(main: Server, world: World):
    """LMCache#3229, #2206: none, a part, or all of a document was computed before; the longer exact prefix wins."""
    ids = [BOS, *document(66, 550), *world.documents["document-12"], *document(25, 551)]
    recomputed = []
    for exact in (0, 64, 200, 400, 579, len(ids)):
        main.flush()
        if exact:
            main.generate(ids[:exact], 1, OFF)
        answer = main.generate(ids, 6)
        counts(answer.report)
        assert answer.report["cached_tokens"] == min(exact, len(ids) - 1) // 32 * 32
        if answer.report["arm"] == "dense":
            assert answer.cached == answer.report["cached_tokens"]
        recomputed.append(answer.report["forwarded_rows"])
        if answer.report["arm"] == "dense":
            assert world.reference.wrong(ids, answer.ids) == []
    assert recomputed[1] <= recomputed[0]
    assert recomputed[-1] <= 32


def test_twenty_rows_one_after_the_other_leak_nothing(main: Server, world: World):
    """LMCache#2496."""
    main.flush()
    draw, names = random.Random(1), sorted(world.texts)
    for number in range(20):
        parts = [world.documents[name] for name in draw.sample(names, 2)]
        ids = [BOS]
        for part in parts:
            ids += document(draw.randint(0, 40), 600 + number) + part
        ids += document(draw.randint(3, 40), 650 + number)
        assert same(main.generate(ids, 4), embedded(world, ids, 4)), number


@pytest.mark.parametrize("offset", [1, 32, 67])
def test_documents_end_at_every_seam(main: Server, world: World, offset: int):
    """LMCache#4667."""
    main.flush()
    asked = []
    for length in SEAMS:
        head = [BOS, *document(offset - 1, 700)]
        asked.append([*head, *world.documents[f"seam-{length}"], *document(17, 701)])
    parts = [token for length in SEAMS for token in world.documents[f"seam-{length}"]]
    asked.append([BOS, *document(offset - 1, 702), *parts, *document(17, 703)])
    for ids, answer in zip(asked, main.together([main.body(ids, 4) for ids in asked]), strict=True):
        assert same(answer, embedded(world, ids, 4)), len(ids)
        counts(answer.report)
    assert {one["length"] for one in answer.report["documents"]} >= {127, 128, 129, 257}


def test_short_documents_that_are_pointed_out_say_so(main: Server, world: World):
    for length in (1, 3, 4, 31):
        ids = [BOS, *document(9, 710), *world.documents[f"seam-{length}"], *document(17, 711)]
        spans = [[10, 10 + length]]
        answer = main.generate(ids, 4, {"spans": spans})
        [one] = answer.report["documents"]
        assert (one["start"], one["length"], one["reused"], one["reason"]) == (10, length, 0, "too_short")
        assert one["recomputed"] == length


def test_the_middle_of_three_documents_is_new(main: Server, world: World):
    """LMCache#835, #1291: known, unknown, known."""
    main.flush()
    first, last = world.documents["document-13"], world.documents["document-14"]
    ids = [BOS, *first, *document(150, 720), *last, *document(12, 721)]
    answer = main.generate(ids, 6)
    found = [(one["start"], one["reason"]) for one in answer.report["documents"]]
    assert [reason for _, reason in found] == [None, None]
    assert found[0][0] == 1
    assert abs(found[1][0] - (1 + len(first) + 150)) <= 32
    assert same(answer, embedded(world, ids, 6))


def test_a_document_gets_the_same_ids_wherever_it_stands(main: Server, world: World):
    """LMCache#1136, #2026: one BOS, in front of the prompt."""
    text = world.texts["document-15"]
    for prompt in (text, f"Read this.\n{text}", f"Read this.\n{text}\nSo?", f"{text}{text}"):
        main.flush()
        answer = main.generate(prompt, 2)
        assert answer.report["arm"] == "reuse"
        ids = world.engine().tokenizer.encode(prompt)
        assert answer.report["prompt_tokens"] == 1 + len(ids)
        for one in answer.report["documents"]:
            assert one["matched"] >= one["artifact_tokens"] - 2 * 32
    inside = [BOS, *document(5, 730), BOS, *world.documents["document-15"], 9]
    answer = main.generate(inside, 2)  # ids are taken as they are
    assert answer.report["prompt_tokens"] == len(inside)
    assert same(answer, embedded(world, inside, 2))


def test_reuse_while_others_run_has_its_own_window(main: Server, world: World):
    """ATOM#1417: eight at the same time, each as if it were alone."""
    main.flush()
    names = sorted(world.texts)[16:24]
    asked = [[BOS, *document(7, 740), *world.documents[name], *document(30, 741)] for name in names]
    for ids, answer in zip(asked, main.together([main.body(ids, 12) for ids in asked]), strict=True):
        assert same(answer, embedded(world, ids, 12))


EDGES = {
    "space": " {} ",
    "newline": "\n\n{}\n",
    "digit": "7 {} 12",
    "han": "字{}字",
    "emoji": "🦊{}🦊",
    "half a word": "ning {} run",
}


def test_documents_with_edges_that_merge_are_found(main: Server, world: World):
    """LMCache#3228, #1136: text in front and behind may take a token of the document, and never more than a block."""
    tokenizer = world.engine().tokenizer
    words, texts = world.texts["document-22"].split(), {}
    for number, (name, shape) in enumerate(EDGES.items()):
        random.Random(number).shuffle(words)
        texts[name] = shape.format(" ".join(words[:150]))
    documents = {name: tokenizer.encode(text).tolist() for name, text in texts.items()}
    made = publish(world.checkpoint, world.store, list(documents.values()), [SHIPPED["rowsparse"]])
    for name, certificate in zip(texts, made, strict=True):
        main.flush()
        prompt = f"run{texts[name]}ning 3"
        answer = main.generate(prompt, 4)
        [one] = answer.report["documents"]
        assert one["artifact_id"] == certificate.artifact_id, name
        assert one["matched"] >= len(documents[name]) - 2 * BLOCK, name
        assert same(answer, embedded(world, [BOS, *tokenizer.encode(prompt).tolist()], 4)), name
        spans = {"spans": [[4, 4 + len(documents[name])]]}
        ids = [BOS, *tokenizer.encode("run").tolist(), 9, 9, 9][:4] + documents[name] + [44, 45, 46]
        pointed = main.generate(ids, 4, spans)
        assert pointed.report["documents"][0]["matched"] == len(documents[name]), name
    for certificate in made:
        assert main.call("DELETE", f"/redknot/documents/{certificate.artifact_id}").status_code == 200


def test_a_document_that_keeps_no_windows_is_a_hit(main: Server, world: World):
    """sglang#35129, #28058: what is not kept is computed again."""
    main.flush()
    part = document(300, 750)
    publish(world.checkpoint, world.store, [part], [SHIPPED["turbo"]], windows=parse_strategy("none"))
    ids = [BOS, *document(40, 751), *part, *document(20, 752)]
    answer = main.generate(ids, 6, {"profile": "turbo"})
    assert answer.report["arm"] == "reuse"
    assert answer.report["reused_tokens"] > 200
    assert same(answer, embedded(world, ids, 6, "turbo"))
