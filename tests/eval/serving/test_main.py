"""The command against a server that streams as SGLang does: records, resume, what is refused, what has failed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eval.provenance import checkpoint_identity
from eval.results import Build, Load, Run, read_results
from eval.serving.__main__ import main
from tests.kit.child import NANO
from tests.kit.fakesglang import Fake, faking, in_report, last

ARMS = ("recompute", "turbo", "prefix")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Filled by the first run, found by the others."""
    return tmp_path_factory.mktemp("serving") / "store"


@pytest.fixture
def fake() -> Iterator[Fake]:
    with faking(checkpoint=checkpoint_identity(NANO).digest) as found:
        yield found


@pytest.fixture
def serve(fake, store, tmp_path) -> Callable[..., int]:
    def run(*words: str, out: str = "out", rounds: int = 2) -> int:
        common = ["--url", fake.url, "--store", str(store), "--out", str(tmp_path / out), "--arms", "turbo,prefix"]
        small = ["--documents", "3", "--document-tokens", "128", "--prompt-documents", "2", "--requests", "3"]
        return main([*common, *small, "--rounds", str(rounds), "--new-tokens", "2", *words])

    return run


def loads(folder: Path) -> list[Load]:
    return [one for one in read_results(folder / "results.jsonl") if isinstance(one, Load)]


def test_rounds_of_every_arm(serve, fake, tmp_path, capsys):
    assert serve("--levels", "40,80") == 0
    records = list(read_results(tmp_path / "out" / "results.jsonl"))
    assert [type(one) for one in records[:2]] == [Run, Build]
    run = records[0]
    assert isinstance(run, Run)
    assert (run.tool, run.engine, run.versions["sglang"]) == ("serving", "sglang", "0.5.23")
    found = loads(tmp_path / "out")
    counts = Counter((one.level, one.round, one.arm) for one in found)
    assert counts == {(level, number, arm): 3 for level in (40.0, 80.0) for number in (0, 1) for arm in ARMS}
    assert all(one.error == "" and one.new_tokens == 2 and one.loop == "open" for one in found)
    # Every arm gets the same prompts at the same times, and who goes first changes.
    for level in (40.0, 80.0):
        for number in (0, 1):
            sides = [
                [(one.number, one.arrived_s, one.prompt_tokens) for one in found if key(one) == (level, number, arm)]
                for arm in ARMS
            ]
            assert sides[0] == sides[1] == sides[2]
    order = list(dict.fromkeys((one.round, one.arm) for one in found))
    assert [arm for number, arm in order if number == 1] == [arm for number, arm in order if number == 0][::-1]
    assert fake.flushed == 12
    assert "turbo" in capsys.readouterr().out


def key(load: Load) -> tuple[float, int, str]:
    return load.level, load.round, load.arm


def test_equal_prompts_and_keys_of_their_own(serve, fake):
    assert serve("--levels", "50", rounds=1) == 0
    bodies = [body for body in fake.bodies if body["sampling_params"]["max_new_tokens"] == 2]
    assert len(bodies) == 9
    assert all(body["sampling_params"]["ignore_eos"] for body in bodies)
    prompts = [tuple(body["input_ids"]) for body in bodies]
    assert sorted(Counter(prompts).values()) == [3, 3, 3]
    keys = Counter(body["extra_key"] for body in bodies)
    assert sorted(keys.values()) == [1, 1, 1, 1, 1, 1, 3]  # the prefix arm's round shares one


def test_a_run_goes_on(serve, fake, tmp_path):
    assert serve("--levels", "50", rounds=1) == 0
    asked = len(fake.bodies)
    assert serve("--levels", "50", rounds=1) == 0
    assert len(fake.bodies) == asked
    path = tmp_path / "out" / "results.jsonl"
    kept = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(kept[:-1]) + kept[-1][:20])  # cut within the last record
    assert serve("--levels", "50", rounds=2) == 0
    counts = Counter((one.round, one.arm) for one in loads(tmp_path / "out"))
    assert counts.total() == 18 + 2  # the round that was cut ran again, whole


def test_clients_that_wait(serve, fake, tmp_path, capsys):
    fake.first_s = 0.01
    assert serve("--concurrency", "1,2", "--json", rounds=1) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["failed"], found["loop"]) == (0, "closed")
    assert {(one["level"], one["arm"]) for one in found["levels"]} == {(n, arm) for n in (1, 2) for arm in ARMS}
    assert all(one["requests"] == 3 and one["ttft_p50"]["value"] > 0.01 for one in found["levels"])
    assert {one.loop for one in loads(tmp_path / "out")} == {"closed"}


def test_what_would_be_done(serve, fake, tmp_path, capsys):
    assert serve("--levels", "2,4", "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 3 * 2 * 2 * 3
    assert found["least_seconds"] > 0
    assert serve("--levels", "2,4", "--dry-run") == 0
    assert "36 requests" in capsys.readouterr().out
    assert fake.bodies == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"lie": in_report(arm="dense", reason="no_match", detail="none is known")}, "arm turbo cannot be measured"),
        ({"lie": last(prompt_tokens=1)}, "arm recompute cannot be measured: unequal tokens"),
        ({"status": 500}, "arm recompute cannot be measured: .* 500"),
        ({"health": {"checkpoint": "e" * 64}}, "serves checkpoint eeeeeeeeeeee"),
        ({"health": {"profiles": {}}}, "does not have profile recompute"),
    ],
)
def test_a_server_that_cannot_be_measured(serve, fake, capsys, behaviour, message, tmp_path):
    for name, value in behaviour.items():
        setattr(fake, name, value)
    assert serve("--levels", "50") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
    assert not [one for one in read_results(tmp_path / "out" / "results.jsonl") if isinstance(one, Load)]


def test_failures_under_load_are_counted(serve, fake, tmp_path, capsys):
    def lie(body, events):
        measured = body["sampling_params"]["max_new_tokens"] == 2
        turbo = body["sampling_params"]["custom_params"]["redknot"]["profile"] == "turbo"
        return (
            in_report(arm="dense", reason="section_late", detail="it took long")(body, events)
            if measured and turbo
            else events
        )

    fake.lie = lie
    assert serve("--levels", "50", rounds=1) == 1
    found = capsys.readouterr()
    assert "3 requests failed" in found.err
    wrong = [one for one in loads(tmp_path / "out") if one.error]
    assert [one.arm for one in wrong] == ["turbo"] * 3
    assert all("ran dense: section_late" in one.error for one in wrong)
    assert serve("--levels", "50", rounds=1) == 1  # still there, and not asked again


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--levels", "0"], "--levels 0: give numbers above 0"),
        (["--levels", "1,fast"], "give numbers above 0"),
        (["--levels", "inf"], "give numbers above 0"),
        (["--concurrency", "1.5"], "--concurrency 1.5: give numbers"),
        (["--prompt-documents", "4"], "--prompt-documents 4: there are 3 documents"),
        (["--arms", "fan-out"], "use --engine embedded"),
        (["--arms", "no-such"], "arm 'no-such' is neither"),
        (["--model", "nowhere"], "--model nowhere: no such folder"),
        (["--corpus", "nowhere"], "nowhere"),
        (["--document-tokens", "8"], "give longer ones"),
        (["--new-tokens", "99999"], "the model has 65536 positions"),
        (["--url", "http://127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_refusals(serve, capsys, words, message):
    assert serve(*words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("python -m eval.serving: error: ")
    assert error.count("\n") == 1


def test_other_options_need_another_folder(serve, capsys):
    assert serve("--levels", "50", rounds=1) == 0
    assert serve("--levels", "50", "--seed", "3", rounds=1) == 2
    assert "option seed" in capsys.readouterr().err
