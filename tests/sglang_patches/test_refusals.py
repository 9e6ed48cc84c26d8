"""A server that cannot serve as it was asked ends before it listens: one line, and an exit code that is not zero."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit import child

STARTS = {
    "launch_server": (sys.executable, "-m", "sglang.launch_server"),
    "serve": (str(Path(sys.executable).parent / "sglang"), "serve"),
}


@dataclass(frozen=True)
class Case:
    """Options beside those of a server that would start, and the line that they end it with; {} is a folder."""

    options: str
    line: str
    model: str = "nano"
    store: str = "{}/store"


CASES = {
    "a model that is none of ours": Case(
        "", "model_type 'llama' is not supported; RedKnot serves 'deepseek_v4'", model="{}/llama"
    ),
    "no such store": Case("", "{}/absent", store="{}/absent"),
    "no such profile": Case("--redknot-profile sparserow", "sparserow"),
    "a device that is not there": Case(
        "--device cuda", "--device cuda: no CUDA device was found on this machine; serve with --device cpu"
    ),
    "speculative decoding": Case(
        "--speculative-algorithm EAGLE",
        "--speculative-algorithm: speculative decoding cannot be used with --enable-redknot",
    ),
    "a device that is not spelled out": Case("--devic cpu", "write --device cpu in full"),
    "a wrong option in a configuration file": Case("--redknot-config {}/config.yaml", "keys: Extra inputs"),
}


# A refusal does not depend on the start; what a start does before it is seen in two cases.
QUICK = [("launch_server", case) for case in CASES] + [("serve", "no such store"), ("serve", "speculative decoding")]
SLOW = [("serve", case) for case in CASES if ("serve", case) not in QUICK]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from redknot.artifact.store import ArtifactStore

    found = tmp_path_factory.mktemp("refusals")
    with ArtifactStore(found / "store", create=True):
        pass
    (found / "llama").mkdir()
    (found / "llama" / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "hidden_size": 64}'
    )
    (found / "config.yaml").write_text("keys: {}")
    return found


def start(name: str, case: str, folder: Path) -> child.Ended:
    one = CASES[case]
    device = [] if "--devic" in one.options else ["--device", "cpu"]
    words = [*STARTS[name], "--model-path", one.model, *device, "--enable-redknot", "--redknot-store", one.store]
    return child.run(*(word.replace("{}", str(folder)) for word in [*words, *one.options.split()]))


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[tuple[str, str], child.Ended]:
    """Most of a start is imports: two at a time."""
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda pair: start(*pair, folder), QUICK)
        return dict(zip(QUICK, found, strict=True))


def check(done: child.Ended, case: str, folder: Path) -> None:
    assert done.code == 2, done.err
    lines = [line for line in done.err.splitlines() if line.startswith("redknot: ")]
    assert len(lines) == 1, done.err
    assert CASES[case].line.replace("{}", str(folder)) in lines[0]
    assert "Traceback" not in done.err + done.out
    assert "huggingface.co" not in done.err
    assert "Uvicorn running" not in done.err + done.out


@pytest.mark.parametrize(("name", "case"), QUICK)
def test_one_line_and_an_exit_code(name, case, ended, folder):
    check(ended[name, case], case, folder)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), SLOW)
def test_one_line_by_the_other_start(name, case, folder):
    check(start(name, case, folder), case, folder)
