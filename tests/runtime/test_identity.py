"""One changed byte, field or version is another model, and the field is named."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from redknot.artifact.identity import ModelIdentity, differences
from redknot.errors import CheckpointError
from redknot.model.geometry import load_geometry
from redknot.runtime import identity
from redknot.runtime.identity import model_identity
from tests.kit.corpus import write_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def identify(checkpoint: Path, dtype: torch.dtype = torch.float32) -> ModelIdentity:
    return model_identity(checkpoint, load_geometry(checkpoint), dtype, checkpoint.parent / "cache")


def edit(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def test_a_copy_is_the_same_model(original, checkpoint):
    assert identify(original) == identify(checkpoint)
    assert identify(checkpoint).dtype == "float32"


def test_one_weight_byte(original, checkpoint):
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert differences(identify(original), identify(checkpoint)) == ("weights_hash",)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        (b'"index_topk": 64', b'"index_topk": 32', "geometry.index_topk"),
        (b'"rope_theta": 10000.0, "partial', b'"rope_theta": 10001.0, "partial', "geometry.rope_main.theta"),
        (b'"factor": 16.0', b'"factor": 8.0', "geometry.rope_compress.yarn.factor"),
    ],
)
def test_one_field_of_the_configuration(original, checkpoint, old, new, field):
    edit(checkpoint / "config.json", old, new)
    assert differences(identify(original), identify(checkpoint)) == (field,)


def test_tokenizer_dtype_and_prompt_encoder(original, checkpoint, monkeypatch):
    (checkpoint / "tokenizer.json").write_bytes((original / "tokenizer.json").read_bytes() + b"\n")
    assert differences(identify(original), identify(checkpoint)) == ("tokenizer_hash",)
    assert differences(identify(original), identify(original, torch.bfloat16)) == ("dtype",)
    before = identify(original)
    monkeypatch.setattr(identity, "PROMPT_ENCODER", "another")
    assert differences(before, identify(original)) == ("prompt_encoder",)


def test_hashes_come_from_the_cache_unless_verified(original, tmp_path):
    geometry = load_geometry(original)
    known = model_identity(original, geometry, torch.float32, tmp_path)
    cache = tmp_path / identity.WEIGHT_CACHE_FILE
    digest = cache.read_text().split('"')[-2]
    cache.write_text(cache.read_text().replace(digest, "0" * 64))
    assert model_identity(original, geometry, torch.float32, tmp_path) != known
    assert model_identity(original, geometry, torch.float32, tmp_path, verify_weights=True) == known


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json"])
def test_what_is_missing_is_named(checkpoint, missing):
    (checkpoint / missing).unlink()
    with pytest.raises(CheckpointError, match=missing.removeprefix("model")):
        identify(checkpoint)


def test_geometry_is_what_counts(original):
    geometry = load_geometry(original)
    cache = original.parent / "cache"
    changed = model_identity(original, replace(geometry, window=64), torch.float32, cache)
    assert differences(identify(original), changed) == ("geometry.window",)
