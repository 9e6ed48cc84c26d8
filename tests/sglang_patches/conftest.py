"""What SGLang is here: found out once, in a process of its own, since importing it changes a process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from redknot.artifact.store import ArtifactStore
from tests.kit import child

_LOOK = """
import argparse, inspect, json, pkgutil, sys
from sglang_patches import kernels
kernels.install()
import msgspec
from sglang.srt.server_args import ServerArgs
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang_patches.table import HOOKS

def kind(owner, name, found):
    raw = vars(owner).get(name) if inspect.isclass(owner) else found
    for one in (classmethod, staticmethod, property):
        if isinstance(raw, one):
            return one.__name__
    words = ["async"] if inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found) else []
    words += ["generator"] if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found) else []
    return " ".join([*words, "method" if inspect.isclass(owner) else "function"])

def plain(value):
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)

targets = {}
for hook in HOOKS:
    place, _, name = hook.target.rpartition(".")
    try:
        owner = pkgutil.resolve_name(place)
        found = getattr(owner, name)
    except (ImportError, AttributeError):
        continue
    parameters = inspect.signature(found).parameters.values()
    short = {"POSITIONAL_OR_KEYWORD": "", "KEYWORD_ONLY": "=", "VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    targets[hook.target] = {
        "kind": kind(owner, name, found),
        "parameters": [short[one.kind.name] + one.name for one in parameters],
    }
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps({
    "targets": targets,
    "fields": {one.name: plain(one.default) for one in msgspec.structs.fields(ServerArgs)},
    "defaults": {name: plain(value) for name, value in vars(parser.parse_args(["--model-path", "x"])).items()},
    "requests": sorted(vars(GenerateReqInput(text="a"))),
    "options": {name: action.dest for action in parser._actions for name in action.option_strings},
}))
"""


@dataclass(frozen=True)
class Installed:
    """The installed SGLang: our hooks' targets, the fields of its arguments and requests, its command line."""

    targets: dict[str, dict[str, Any]]
    fields: dict[str, Any]
    defaults: dict[str, Any]
    options: dict[str, str]
    requests: list[str]


@pytest.fixture(scope="session")
def installed() -> Installed:
    done = child.python(_LOOK, SGLANG_USE_CPU_ENGINE="1")
    assert done.code == 0, done.err
    return Installed(**json.loads(done.out.splitlines()[-1]))


@pytest.fixture
def empty_store(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    with ArtifactStore(path, create=True):
        return path
