"""Items as ids: BOS once, parts tokenised alone, a chat's frame outside, the question without its documents."""

from __future__ import annotations

import shutil

import pytest

from eval.encoder import Encoder
from eval.items import Item
from tests.kit.corpus import ROOT, document

DOCUMENTS = (document(40, 1), document(50, 2))


def an_item(**changes):
    fields = {
        "dataset": "d",
        "id": "1",
        "cluster": "1",
        "parts": (("Read.\n", False), *((text, True) for text in DOCUMENTS), ("\nAnswer:", False)),
        "references": ("x",),
        "max_new_tokens": 4,
        "score": len,
    }
    return Item(**(fields | changes))


@pytest.fixture
def encoder(checkpoint):
    return Encoder.load(checkpoint)


def test_documents_are_what_they_are_alone(encoder):
    prompt = encoder.encode(an_item())
    assert prompt.token_ids[0] == encoder.tokenizer.bos_id
    assert encoder.tokenizer.bos_id not in prompt.token_ids[1:]
    assert [ids.tolist() for ids in prompt.documents] == [encoder.tokenizer.encode(text).tolist() for text in DOCUMENTS]
    assert [len(ids) for ids in prompt.documents] == [40, 50]


def test_the_question_alone_has_the_rest(encoder):
    prompt, alone = encoder.encode(an_item()), encoder.question(an_item())
    assert alone.spans == ()
    assert len(alone) == len(prompt) - 90
    assert alone.token_ids.tolist() == [
        *prompt.token_ids[: prompt.spans[0][0]],
        *prompt.token_ids[prompt.spans[1][1] :],
    ]


def test_a_chat_stands_around_the_prompt_of_chat_tasks_alone(checkpoint, tmp_path):
    own = shutil.copytree(checkpoint, tmp_path / "own")
    shutil.copy(ROOT / "models/nano/tokenizer_config.json", own)
    encoder = Encoder.load(own)
    plain, chat = encoder.encode(an_item()), encoder.encode(an_item(chat=True))
    assert chat.token_ids.tolist() == [*plain.token_ids, *encoder.chat.after]
    assert chat.spans == plain.spans
    assert Encoder.load(own, chat=False).encode(an_item(chat=True)).sha256 == plain.sha256


def test_an_answer_ends_at_a_line_break_that_is_not_its_start():
    stopping = an_item(stop_at_newline=True)
    assert stopping.answer("one\ntwo\n") == "one"
    assert stopping.answer("\none\ntwo") == "\none"
    assert stopping.answer("one") == "one"
    assert stopping.answer("") == ""
    assert an_item().answer("one\ntwo") == "one\ntwo"
