"""The nano tokenizer: lossless, deterministic, one token per generator word, loadable by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from redknot.nano import names
from redknot.nano import tokenizer as nano_tokenizer

COMMITTED = Path(__file__).parents[2] / "models" / "nano"
HARD_TEXTS = [
    "",
    "  leading, trailing  ",
    "a\n\n\nb\r\n\tc",
    "\x00\x01\x7f\x85\u200b\ufeff\u2028",
    "漢字かな交じり文 한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈",
    "Ġ ▁ Ċ <0x41>",
    "e\u0301 é \u202eabc",
    "\U0010ffff",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(COMMITTED / "tokenizer.json"))


def round_trip(tokenizer: Tokenizer, text: str) -> str:
    return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False))


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_texts_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert round_trip(tokenizer, text) == text


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert round_trip(tokenizer, text) == text


def test_build_is_deterministic_and_is_what_is_committed(tmp_path: Path) -> None:
    nano_tokenizer.save(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (COMMITTED / name).read_bytes()


def test_vocabulary_layout(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == nano_tokenizer.VOCAB_SIZE == 2048
    specials = [nano_tokenizer.BOS, nano_tokenizer.EOS, nano_tokenizer.PAD]
    assert [tokenizer.token_to_id(token) for token in specials] == [0, 1, 2]
    ids = {tokenizer.token_to_id(char) for char in nano_tokenizer.BYTE_CHARS.values()}
    assert ids == set(range(3, nano_tokenizer.FIRST_WORD_ID))


def test_text_has_no_special_tokens_and_a_prompt_has_bos_in_front(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("The rain settled.").ids[0] == nano_tokenizer.BOS_ID
    assert min(tokenizer.encode("The rain settled.", add_special_tokens=False).ids) > nano_tokenizer.PAD_ID


def test_generator_words_are_single_tokens(tokenizer: Tokenizer) -> None:
    spaced = [*names.RELATIONS, *names.VALUE_WORDS, *names.VALUE_NUMBERS, *names.FIRST_HEADS, *names.LAST_HEADS]
    for word in [*spaced, *(word for group in names.FILLER_WORDS.values() for word in group)]:
        assert len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) == 1, word


def test_every_name_is_four_tokens(tokenizer: Tokenizer) -> None:
    for split in ("train", "test"):
        for parts in (*names.first_names(split), *names.last_names(split)):
            assert len(tokenizer.encode(f" {''.join(parts)}", add_special_tokens=False).ids) == 2, parts


def test_transformers_loads_it_beside_a_deepseek_config(tokenizer: Tokenizer, tmp_path: Path) -> None:
    nano_tokenizer.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"}))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, 1, 2)
    assert len(loaded) == nano_tokenizer.VOCAB_SIZE
    for text in [*HARD_TEXTS, "\nQuestion: What is the code of Marla Quintel?", "x , y . don't"]:
        ids = loaded(text)["input_ids"]
        assert ids == [0, *loaded(text, add_special_tokens=False)["input_ids"]]
        ids = ids[1:]
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids
        assert loaded.decode(ids) == text
    messages = [{"role": "user", "content": "What is the code?"}]
    said = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert said == "<|bos|>What is the code?\n"
