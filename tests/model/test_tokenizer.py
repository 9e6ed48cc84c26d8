"""Text to ids and back, with no way for text to become a control token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken

from redknot.errors import CheckpointError, InputError
from redknot.model.tokenizer import Tokenizer, load_tokenizer, tokenizer_hash
from redknot.nano.parameters import CONFIG, GEOMETRY
from redknot.nano.tokenizer import BOS_ID, build_tokenizer

TEXTS = ["", " ", "a\r\n\tb", "The code of Marla is amber 157.", "日本語 \N{GRINNING FACE} é \x00 \ufeff", "  0123  "]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    inner = build_tokenizer()
    inner.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder, GEOMETRY)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert (ids.dtype, ids.ndim) == (np.int64, 1)
    assert tokenizer.decode(ids) == text


def test_no_special_token_is_added(tokenizer):
    assert tokenizer.bos_id == BOS_ID
    assert tokenizer.eos_ids == (1,)
    assert not set(tokenizer.encode("The code").tolist()) & {0, 1, 2}


@pytest.mark.parametrize("text", ["<|bos|>", "a<|bos|>b <|eos|>", "<|pad|><|pad|>", "<|bos|"])
def test_control_tokens_written_out_are_plain_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert not set(ids.tolist()) & {0, 1, 2}
    assert tokenizer.decode(ids) == text


def test_role_markers_are_control_tokens_too(tmp_path):
    """Added tokens that the file does not call special, as DeepSeek's role markers."""
    inner = build_tokenizer()
    inner.add_tokens([AddedToken("<|User|>", normalized=False, special=False)])
    inner.save(str(tmp_path / "tokenizer.json"))
    geometry = replace(GEOMETRY, vocab_size=3000)
    tokenizer = load_tokenizer(tmp_path, geometry)
    marker = 2048
    ids = tokenizer.encode("hello <|User|> there")
    assert marker not in ids
    assert tokenizer.decode(ids) == "hello <|User|> there"
    assert tokenizer.decode([marker]) == "<|User|>"


def test_a_tokenizer_that_makes_control_tokens_of_text_is_refused_by_name(folder):
    """An unknown-token id, say: text must not be lost in it silently."""
    geometry = replace(GEOMETRY, bos_token_id=int(load_tokenizer(folder, GEOMETRY).encode("a")[0]))
    with pytest.raises(InputError, match=f"control token {geometry.bos_token_id}"):
        load_tokenizer(folder, geometry).encode("a")


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    inner = build_tokenizer()
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "tokenizer.json"))
    text = "one two three four five six seven"
    assert tokenizer_ids(tmp_path, text) == build_tokenizer().encode(text, add_special_tokens=False).ids


def tokenizer_ids(folder: Path, text: str) -> list[int]:
    return load_tokenizer(folder, GEOMETRY).encode(text).tolist()


def test_ids_beyond_the_model(folder):
    with pytest.raises(InputError, match="the model has 100"):
        load_tokenizer(folder, replace(GEOMETRY, vocab_size=100)).encode("hello there")


def test_lone_surrogate(tokenizer):
    with pytest.raises(InputError, match="surrogate"):
        tokenizer.encode("a\ud800b")


class Counting:
    """A tokenizer that notes the longest text it is given, and all of them together."""

    def __init__(self, inner: object) -> None:
        self.inner, self.longest, self.total = inner, 0, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def encode(self, text: str, **options: object) -> object:
        self.longest, self.total = max(self.longest, len(text)), self.total + len(text)
        return self.inner.encode(text, **options)


@pytest.mark.parametrize("text", ["The code of Marla is amber 157.\n", "\x00é日", " ", "a", "ab" * 50_000])
def test_a_text_that_is_too_long_shows_at_its_beginning(folder, monkeypatch, text):
    """20 MB are not encoded to learn that they are more than a thousand tokens."""
    tokenizer = load_tokenizer(folder, GEOMETRY)
    counting = Counting(tokenizer._inner)
    monkeypatch.setattr(tokenizer, "_inner", counting)
    assert tokenizer.exceeds(text * (20_000_000 // len(text)), 1000)
    assert counting.longest <= 65536
    assert counting.total <= 2 * 65536


@pytest.mark.parametrize("text", ["The code of Marla is amber 157.\n", "\x00é日 ", " ", "a", "ab" * 5000, "\n\n \t"])
@pytest.mark.parametrize("length", [0, 1, 1000, 200_000])
def test_a_text_that_fits_never_exceeds(tokenizer, text, length):
    """Whatever cuts do to the count, also where they split what would be one token."""
    long = (text * (length // len(text) + 1))[:length]
    assert not tokenizer.exceeds(long, len(tokenizer.encode(long)))


def test_geometry_is_read_when_not_given(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": [5, 6]}))
    assert load_tokenizer(folder).eos_ids == (5, 6)


def test_hash_is_of_the_file(folder, tmp_path):
    data = (folder / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(data)
    assert tokenizer_hash(tmp_path) == load_tokenizer(tmp_path, GEOMETRY).file_hash == tokenizer_hash(folder)
    (tmp_path / "tokenizer.json").write_bytes(data + b"\n")
    assert tokenizer_hash(tmp_path) == load_tokenizer(tmp_path, GEOMETRY).file_hash != tokenizer_hash(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b'{"added_tokens": [{}]}', b'{"model": {}}'])
def test_not_a_tokenizer(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        load_tokenizer(tmp_path, GEOMETRY)


@pytest.mark.parametrize("where", ["", "missing", "tokenizer.json/x"])
def test_no_tokenizer(tmp_path, where):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path / where, GEOMETRY)
