"""A start reads no weights; any changed byte is another identity."""

import errno
import json
import os
from pathlib import Path

import pytest

from redknot.artifact import weights
from redknot.artifact.weights import weights_identity
from redknot.errors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for name in ("b.safetensors", "a.safetensors"):
        write_old(path / name, name.encode() * 10)
    (path / "config.json").write_text("{}")
    return path


def write_old(path: Path, data: bytes, at: int = 1_600_000_000) -> None:
    path.write_bytes(data)
    os.utime(path, (at, at))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose content was hashed."""
    seen: list[str] = []
    real = weights.file_sha256

    def spy(path: Path) -> str:
        seen.append(path.name)
        return real(path)

    monkeypatch.setattr(weights, "file_sha256", spy)
    return seen


def test_the_second_start_reads_nothing(checkpoint: Path, tmp_path: Path, reads: list[str]) -> None:
    cache = tmp_path / "cache" / "weights.json"
    first = weights_identity(checkpoint, cache)
    assert sorted(reads) == ["a.safetensors", "b.safetensors"]
    assert weights_identity(checkpoint, cache) == first
    assert len(reads) == 2
    assert weights_identity(checkpoint, cache, verify=True) == first
    assert len(reads) == 4


def test_only_the_changed_file_is_read(checkpoint: Path, tmp_path: Path, reads: list[str]) -> None:
    cache = tmp_path / "weights.json"
    first = weights_identity(checkpoint, cache)
    write_old(checkpoint / "b.safetensors", b"B.safetensors" + b"b.safetensors" * 9, at=1_600_000_001)
    assert weights_identity(checkpoint, cache) != first
    assert reads[2:] == ["b.safetensors"]


def test_verify_sees_what_the_cache_cannot(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "weights.json"
    first = weights_identity(checkpoint, cache)
    file = checkpoint / "a.safetensors"
    before = file.stat()
    with open(file, "r+b") as handle:
        handle.write(b"A")
    os.utime(file, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert weights_identity(checkpoint, cache) == first
    changed = weights_identity(checkpoint, cache, verify=True)
    assert changed != first
    assert weights_identity(checkpoint, cache) == changed


def test_names_count_and_order_does_not(checkpoint: Path, tmp_path: Path) -> None:
    first = weights_identity(checkpoint, tmp_path / "c1")
    (checkpoint / "a.safetensors").rename(checkpoint / "x")
    (checkpoint / "b.safetensors").rename(checkpoint / "a.safetensors")
    (checkpoint / "x").rename(checkpoint / "b.safetensors")
    assert weights_identity(checkpoint, tmp_path / "c2") != first


DEEP = '{"version": 1, "files": ' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}', '{"version": 1, "files": [[1]]}', DEEP])
def test_a_damaged_cache_is_rebuilt(checkpoint: Path, tmp_path: Path, reads: list[str], text: str) -> None:
    cache = tmp_path / "weights.json"
    first = weights_identity(checkpoint, cache)
    cache.write_text(text)
    assert weights_identity(checkpoint, cache) == first
    assert weights_identity(checkpoint, cache) == first
    assert len(reads) == 4


@pytest.mark.parametrize("place", ["weights.json", "model/a.safetensors"])
def test_a_fifo_is_not_waited_for(checkpoint: Path, tmp_path: Path, place: str) -> None:
    cache = tmp_path / "weights.json"
    weights_identity(checkpoint, cache)
    (tmp_path / place).unlink()
    os.mkfifo(tmp_path / place)
    if place == "weights.json":
        assert weights_identity(checkpoint, cache) == weights_identity(checkpoint, tmp_path / "c")
    else:
        with pytest.raises(CheckpointError, match="it is a FIFO, not a regular file"):
            weights_identity(checkpoint, cache)


def test_a_cache_that_cannot_be_written_is_no_failure(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(weights, "write_atomic", refuse)
    assert weights_identity(checkpoint, tmp_path / "weights.json")
    assert "EROFS" in caplog.text


def test_a_file_written_just_now_is_not_cached(checkpoint: Path, tmp_path: Path, reads: list[str]) -> None:
    future = 4_000_000_000
    write_old(checkpoint / "a.safetensors", b"new", at=future)
    weights_identity(checkpoint, tmp_path / "weights.json")
    weights_identity(checkpoint, tmp_path / "weights.json")
    assert reads[2:] == ["a.safetensors"]


def test_checkpoints_that_are_none(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors files"):
        weights_identity(tmp_path / "nowhere", tmp_path / "c")
    real = weights.file_sha256

    def grow(path: Path) -> str:
        digest = real(path)
        path.write_bytes(b"still being copied")
        return digest

    monkeypatch.setattr(weights, "file_sha256", grow)
    with pytest.raises(CheckpointError, match="changed while it was hashed"):
        weights_identity(checkpoint, tmp_path / "c")


def test_only_files_that_are_loaded_count(checkpoint: Path, tmp_path: Path) -> None:
    """One folder with two models, and an index that says which: another index is another model."""
    cache, index = tmp_path / "weights.json", checkpoint / "model.safetensors.index.json"
    both = weights_identity(checkpoint, cache)
    found = {both}
    for name in ("a", "b"):
        index.write_text(json.dumps({"weight_map": {"embed.weight": f"{name}.safetensors"}}))
        found.add(weights_identity(checkpoint, cache))
    assert len(found) == 3
