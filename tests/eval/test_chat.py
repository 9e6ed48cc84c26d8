"""The chat form of a checkpoint: V4's role markers, a template, or none."""

from __future__ import annotations

import json
import shutil

import pytest
from tokenizers import Tokenizer

from eval.chat import load_chat
from redknot.errors import ConfigError
from redknot.model.tokenizer import load_tokenizer
from tests.kit.corpus import ROOT, write_checkpoint
from tests.kit.v4chat import add_control_tokens

BOS = 1


@pytest.fixture
def own(tmp_path):
    folder = write_checkpoint(tmp_path / "own")
    shutil.copy(ROOT / "models/nano/tokenizer_config.json", folder)
    return folder


def with_template(folder, template):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


def test_v4s_own_form_is_made_of_its_markers(own):
    add_control_tokens(own)
    chat = load_chat(own, load_tokenizer(own).bos_id)
    ids = Tokenizer.from_file(str(own / "tokenizer.json")).token_to_id
    assert chat.before == (ids("<｜User｜>"),)
    assert chat.after == (ids("<｜Assistant｜>"), ids("</think>"))


def test_a_template_gives_what_stands_around_a_text_and_no_bos(own):
    tokenizer = load_tokenizer(own)
    chat = load_chat(own, tokenizer.bos_id)
    assert chat.before == ()
    assert tokenizer.decode(chat.after) == "\n"
    with_template(own, "{{ bos_token }}user: {{ messages[0].content }}{% if add_generation_prompt %} bot:{% endif %}")
    chat = load_chat(own, tokenizer.bos_id)
    assert tokenizer.decode(chat.before).strip() == "user:"
    assert tokenizer.decode(chat.after).strip() == "bot:"
    assert tokenizer.bos_id not in chat.before


def test_a_checkpoint_without_a_template_has_none(own):
    (own / "tokenizer_config.json").unlink()
    assert load_chat(own, BOS) is None
    (own / "tokenizer_config.json").write_text("[]")
    assert load_chat(own, BOS) is None


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "nothing of it", "{{ messages[0].content }}{{ messages[0].content }}"]
)
def test_a_template_that_cannot_be_used_is_refused(own, template):
    with_template(own, template)
    with pytest.raises(ConfigError, match="--no-chat leaves it out"):
        load_chat(own, BOS)
