"""A process that makes its own Engine: prepared beforehand, refused like a command line, and served."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sglang_patches
from redknot.errors import ConfigError, RedKnotError
from redknot.nano.corpus import questions
from sglang_patches import embedded, kernels, launch, versions
from tests.kit import child
from tests.kit.child import NANO, ROOT

DOCUMENT = ROOT / "examples" / "corpus" / "document-00.txt"


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process, as one that has not imported SGLang, and is left as it was."""
    before = list(sys.meta_path)
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(embedded, "_prepared", None)
    for name in [name for name in sys.modules if name == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    sys.meta_path[:] = before


def server_args(**changes: Any) -> Any:
    fields = {"model_path": "nano", "device": "cpu", "tp_size": 1, "api_key": None, "context_length": None} | changes
    return SimpleNamespace(**fields, __struct_fields__=tuple(fields))


def test_a_process_is_prepared(process, empty_store):
    found = sglang_patches.activate("nano", store=empty_store, tp_size=2)
    assert found == {"model_path": str(NANO), "device": "cpu", "tp_size": 2}
    assert os.environ["SGLANG_USE_CPU_ENGINE"] == os.environ["REDKNOT_SGLANG"] == "1"
    assert "SGLANG_CPU_OMP_THREADS_BIND" in os.environ
    assert isinstance(sys.meta_path[0], kernels._Finder)
    assert "sglang" not in sys.modules


def test_it_comes_before_sglang(process, empty_store, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace())
    with pytest.raises(ConfigError, match=r"sglang was imported before sglang_patches\.activate\(\)"):
        sglang_patches.activate("nano", store=empty_store)
    assert set(os.environ) <= {"PYTEST_CURRENT_TEST"}


def test_a_second_engine_can_be_made(process, empty_store, monkeypatch):
    first = sglang_patches.activate("nano", store=empty_store)
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace())
    assert sglang_patches.activate("nano", store=empty_store) == first


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ("absent", {}, "no such folder"),
        ("nano", {"device": "cuda"}, "no CUDA device was found"),
        ("nano", {"profile": "sparserow"}, "sparserow"),
        ("nano", {"store": "absent"}, "absent"),
        ("nano", {"config": "absent"}, "No such file"),
    ],
)
def test_refusals_are_those_of_the_command_line(process, empty_store, model, changes, said):
    with pytest.raises(RedKnotError, match=said):
        sglang_patches.activate(model, **{"store": empty_store} | changes)
    assert set(os.environ) <= {"PYTEST_CURRENT_TEST"}


def test_another_sglang_is_refused(process, empty_store, monkeypatch):
    monkeypatch.setattr(versions, "version", lambda _: "0.6.0")
    with pytest.raises(ConfigError, match=r"sglang 0\.6\.0 is installed"):
        sglang_patches.activate("nano", store=empty_store)


def test_the_arguments_of_an_engine_get_their_options(process, empty_store):
    found = server_args(**sglang_patches.activate("nano", store=empty_store), context_length=1024)
    embedded.attach(found)
    options = launch.options_of(found)
    assert options is not None
    assert options.store == empty_store
    assert (found.context_length, found.max_total_tokens, found.dtype) == (1024, 8192, "float32")


def test_the_arguments_of_a_command_line_have_theirs(process):
    found = server_args(_redknot=object())
    embedded.attach(found)
    assert not hasattr(found, "dtype")


def test_arguments_that_cannot_be_served_are_refused(process, empty_store):
    prepared = sglang_patches.activate("nano", store=empty_store)
    for changes in ({"speculative_algorithm": "EAGLE"}, {"device": "cuda"}, {"context_length": 10**6}):
        with pytest.raises(ConfigError):
            embedded.attach(server_args(**prepared | changes))


def test_arguments_from_elsewhere_are_refused(process, empty_store):
    with pytest.raises(ConfigError, match=r"did not come from sglang_patches\.activate\(\)"):
        embedded.attach(server_args())
    sglang_patches.activate("nano", store=empty_store)
    with pytest.raises(ConfigError, match=r"did not come from sglang_patches\.activate\(\)"):
        embedded.attach(server_args(model_path="elsewhere"))


_WITHOUT = """
import sglang
if __name__ == "__main__":
    sglang.Engine(model_path="models/nano", device="cpu")
"""


def test_an_engine_without_it_ends_in_one_clear_line(tmp_path):
    """Where the process was told to use the plugin, by a variable that its parent left it; else nothing is changed."""
    script = tmp_path / "without.py"
    script.write_text(_WITHOUT)
    done = child.run(sys.executable, script, REDKNOT_SGLANG="1", SGLANG_USE_CPU_ENGINE="1")
    assert done.code == 1
    assert done.err.splitlines()[-1] == (
        "redknot.errors.ConfigError: these arguments did not come from sglang_patches.activate(); call it before"
        " importing sglang, and make the engine with sglang.Engine(**activate(...))"
    )


_SERVE = """
import json, os, sys
import sglang_patches

def alive(pid):
    try:
        state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"

if __name__ == "__main__":
    store, prompt = sys.argv[1:]
    arguments = sglang_patches.activate("nano", store=store)
    import sglang

    engine = sglang.Engine(**arguments, context_length=2048, random_seed=1)
    greedy = {"max_new_tokens": 6, "temperature": 0}
    off = greedy | {"custom_params": {"redknot": {"reuse": "off"}}}
    found = {"reuse": engine.generate(prompt, greedy)}
    found["off"] = engine.loop.run_until_complete(engine.async_generate(prompt, off))
    found["batch"] = engine.generate([prompt, "The"], [greedy, greedy])
    found["stream"] = list(engine.generate(prompt, off, stream=True))[-1]
    try:
        engine.generate(prompt, {"custom_params": {"redknot": {"reuse": "often"}}})
    except ValueError as error:
        found["refused"] = str(error)
    found["context"] = engine.server_args.context_length
    children = engine.get_all_child_pids()
    engine.shutdown()
    found["children"], found["left"] = len(children), sum(map(alive, children))
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("embedded")
    (folder / "corpus").mkdir()
    (folder / "corpus" / DOCUMENT.name).write_bytes(DOCUMENT.read_bytes())
    words = ("-m", "redknot", "build", "--model", NANO, "--store", folder / "store", folder / "corpus")
    built = child.run(sys.executable, *words)
    assert built.code == 0, built.err
    script = folder / "serve.py"
    script.write_text(_SERVE)
    done = child.run(sys.executable, script, folder / "store", prompt())
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])


def prompt() -> str:
    text = Path(DOCUMENT).read_text(encoding="utf-8")
    return text + questions(text)[0][0]


def answer() -> str:
    return questions(Path(DOCUMENT).read_text(encoding="utf-8"))[0][1]


def test_a_known_document_is_reused(served):
    report = served["reuse"]["meta_info"]["redknot"]
    assert (report["arm"], report["reason"]) == ("reuse", None)
    assert report["reused_tokens"] > 0
    assert report["prompt_tokens"] == report["reused_tokens"] + report["forwarded_rows"]
    assert served["reuse"]["text"].startswith(answer())


def test_a_wish_arrives(served):
    for name in ("off", "stream"):
        report = served[name]["meta_info"]["redknot"]
        assert (report["arm"], report["reason"]) == ("dense", "reuse_off")
        assert served[name]["text"].startswith(answer())
    assert "redknot.reuse must be one of" in served["refused"]


def test_each_of_a_batch_has_its_own_report(served):
    reports = [one["meta_info"]["redknot"] for one in served["batch"]]
    assert [report["arm"] for report in reports] == ["reuse", "dense"]
    assert [report["prompt_tokens"] for report in reports] == [
        one["meta_info"]["prompt_tokens"] for one in served["batch"]
    ]


def test_other_arguments_of_the_engine_count(served):
    assert served["context"] == 2048


def test_nothing_is_left_when_it_is_shut_down(served):
    assert served["children"] > 0
    assert served["left"] == 0
