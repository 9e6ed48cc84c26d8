"""`redknot store-check`: what it counts, what it finds, and that it changes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from redknot.cli.main import main
from redknot.latents.content import caller_name
from redknot.latents.disk import DiskTier
from redknot.latents.diskfile import PREFIX_BYTES

NBYTES = 64
FILE = PREFIX_BYTES + NBYTES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three blocks of one layout and one of another."""
    for layout, count in ((b"one", 3), (b"two", 1)):
        tier = DiskTier(tmp_path / "latents", layout, NBYTES, 10 * FILE)
        for number in range(count):
            tier.write(caller_name("a", b"%d" % number), memoryview(bytes([number]) * NBYTES), 1.0)
    return tmp_path / "latents"


def check(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict]:
    code = main(["store-check", "--cache", str(folder), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_a_sound_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.block")}
    code, found = check(folder, capsys, "--budget", str(5 * FILE))
    assert code == 0
    assert sorted(layout["blocks"] for layout in found["layouts"]) == [1, 3]
    assert found["books"] == {"total": 5 * FILE, "live": 4 * FILE, "quarantined": 0, "free": FILE}
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.block")} == before
    assert main(["store-check", "--cache", str(folder)]) == 0
    assert "4 blocks read, 0 damaged; 544 B in use" in capsys.readouterr().out


def test_what_is_damaged_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third, *_ = sorted(folder.rglob("*.block"))
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    second.write_bytes(b"short")
    third.unlink()
    os.symlink(first, third)
    (first.parent / "foreign").write_text("x")
    code, found = check(folder, capsys)
    assert code == 1
    problems = [problem for layout in found["layouts"] for problem in layout["damaged"]]
    assert len(problems) == 4
    assert any("checksum" in problem for problem in problems)
    assert any("too few" in problem for problem in problems)
    assert sum("no file of a block" in problem for problem in problems) == 2
    assert main(["store-check", "--cache", str(folder)]) == 1
    assert "4 damaged" in capsys.readouterr().out


def test_an_overrun_budget(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = check(folder, capsys, "--budget", str(3 * FILE))
    assert (code, found["books"]["free"]) == (1, -FILE)
    assert main(["store-check", "--cache", str(folder), "--budget", str(3 * FILE)]) == 1
    assert "more than" in capsys.readouterr().out


def test_where_nothing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("REDKNOT_CACHE_DIR", str(tmp_path))
    assert main(["store-check"]) == 0
    assert "0 blocks read" in capsys.readouterr().out
    assert main(["store-check", "--cache", str(tmp_path / "none")]) == 2
    assert "redknot store-check: error: cannot read" in capsys.readouterr().err
    assert main(["store-check", "--budget", "-1"]) == 2
