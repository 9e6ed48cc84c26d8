"""Finding and reading results files: plain and gzipped, cut, doubled, missing and foreign."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from eval.report.files import read_runs, results_files
from redknot.errors import InputError
from tests.kit.results import evaluation, make_run

ARMS = ("recompute", "rowsparse")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return evaluation(ARMS, contexts=2, questions=1).write(tmp_path / "a")


def test_folders_are_searched_and_files_taken(written: Path, tmp_path: Path) -> None:
    packed = tmp_path / "b" / "deep" / "results.jsonl.gz"
    packed.parent.mkdir(parents=True)
    packed.write_bytes(gzip.compress(written.read_bytes()))
    (tmp_path / "b" / "other.jsonl").write_text("{}\n")
    assert results_files([tmp_path]) == [written, packed]
    assert results_files([written, tmp_path / "a", tmp_path / "b" / ".." / "a"]) == [written]


def test_a_gzipped_file_holds_the_same(written: Path, tmp_path: Path) -> None:
    packed = tmp_path / "results.jsonl.gz"
    packed.write_bytes(gzip.compress(written.read_bytes()))
    assert read_runs([packed]) == read_runs([written])


def test_runs_come_in_the_order_in_which_they_started(tmp_path: Path) -> None:
    late = evaluation(ARMS, 1, 1)
    late.run = make_run("run-1", started="2026-02-01T00:00:00Z", arms=ARMS)
    early = evaluation(ARMS, 1, 1)
    early.run = make_run("run-0", started="2026-01-01T00:00:00Z", arms=ARMS)
    early.records = []
    files = [late.write(tmp_path / "a"), early.write(tmp_path / "b")]
    assert [run.run for run, _ in read_runs(files)] == ["run-0", "run-1"]
    assert read_runs(files) == read_runs(files[::-1])


def test_a_last_line_that_was_cut_is_left_out(written: Path) -> None:
    whole = read_runs([written])
    data = written.read_bytes()
    written.write_bytes(data[: data.rstrip(b"\n").rfind(b"\n") + 30])
    (run, records) = read_runs([written])[0]
    assert (run, records) == (whole[0][0], whole[0][1][:-1])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("results.jsonl", b"no json\n", "results.jsonl:1: no result"),
        ("results.jsonl", b'{"kind": "answer"}\n', "results.jsonl:1: no result"),
        ("results.jsonl", b'{"kind": "other"}\n', "results.jsonl:1: no result"),
        ("results.jsonl", b"\xff\xfe\n", "results.jsonl:1: no result"),
        ("results.jsonl.gz", b"plain text\n", "not readable"),
        ("results.jsonl.gz", gzip.compress(b"x" * 1000, mtime=0)[:-9], "not readable"),
        ("results.jsonl.gz", b"", None),
        ("results.jsonl", b"", None),
        ("results.jsonl", b"\n\n", None),
    ],
)
def test_files_that_hold_no_results(tmp_path: Path, name: str, content: bytes, says: str | None) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    if says is None:
        assert read_runs([path]) == []
    else:
        with pytest.raises(InputError, match=says) as caught:
            read_runs([path])
        assert "\n" not in str(caught.value)


def test_records_need_their_run(written: Path) -> None:
    written.write_bytes(written.read_bytes().partition(b"\n")[2])
    with pytest.raises(InputError, match="records name the run 'run-1'"):
        read_runs([written])


def test_two_runs_of_one_name_are_refused(written: Path, tmp_path: Path) -> None:
    other = evaluation(ARMS, 1, 1)
    other.run = make_run(tp=2, arms=ARMS)
    with pytest.raises(InputError, match="a second, different run is called 'run-1'"):
        read_runs([written, other.write(tmp_path / "b")])


def test_places_without_results(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        results_files([tmp_path / "missing"])
    with pytest.raises(InputError, match=r"holds no results\.jsonl"):
        results_files([tmp_path])
