"""Without --enable-redknot nothing changes; with it everything is set, except what a user set."""

from __future__ import annotations

import json
import os

import pytest

from sglang_patches import environment
from sglang_patches.hooks import Process
from sglang_patches.table import hooks_of
from tests.kit import child

# Resolves the platform as SGLang does, runs the plugins, and says what is different then.
_LOOK = """
import argparse, json, os, pkgutil, sys
before = dict(os.environ)
from sglang.srt.platforms import current_platform
current_platform.is_cpu()
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
ours = sorted(name for name in sys.modules if name.startswith(("redknot", "sglang_patches")))
from sglang_patches.table import HOOKS

def hooked(target):
    # Whether one of our functions is in a chain of wrappers.
    owner, _, name = target.rpartition(".")
    if owner not in sys.modules and owner.rpartition(".")[0] not in sys.modules:
        return False
    found = getattr(pkgutil.resolve_name(owner), name)
    while hasattr(found, "__wrapped__"):
        if any("sglang_patches" in getattr(cell.cell_contents, "__module__", "") for cell in found.__closure__):
            return True
        found = found.__wrapped__
    return False

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps({
    "cpu": current_platform.is_cpu(),
    "set": {name: value for name, value in os.environ.items() if before.get(name) != value},
    "finders": [name for name in map(repr, sys.meta_path) if "sglang_patches" in name],
    "hooks": sorted(hook.target for hook in HOOKS if hooked(hook.target)),
    "options": [o for a in parser._actions for o in a.option_strings],
    "ours": ours,
}))
"""
OURS = ["--enable-redknot", "--redknot-store", "--redknot-profile", "--redknot-config"]


def look(*words: str, **changes: str) -> dict:
    done = child.python(_LOOK, *words, **changes)
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])


def ours(found: dict) -> dict[str, str]:
    """Variables that this package sets; importing torch and SGLang sets others."""
    names = (environment.ENABLED, *environment._CPU, environment._MODELS, environment._BINDING)
    return {name: value for name, value in found["set"].items() if name in names}


@pytest.fixture(scope="module")
def plain() -> dict:
    """A server that knows nothing of us."""
    return look("--device", "cpu")


@pytest.fixture(scope="module")
def enabled() -> dict:
    return look("--enable-redknot", "--device", "cpu", "--tp-size", "2")


def test_without_the_option_nothing_changes(plain):
    assert ours(plain) == {}
    assert (plain["finders"], plain["hooks"]) == ([], [])
    assert not [option for option in plain["options"] if "redknot" in option]
    assert not [name for name in plain["ours"] if name.startswith(("redknot.artifact", "redknot.model"))]  # are large


def test_with_the_option_everything_is_set(enabled):
    assert enabled["cpu"]
    assert len(enabled["finders"]) == 1
    assert enabled["hooks"] == sorted(hook.target for hook in hooks_of(Process.PARENT))
    found = ours(enabled)
    cores = found.pop("SGLANG_CPU_OMP_THREADS_BIND").split("|")
    assert len(cores) == 2
    assert {int(core) for core in cores} <= os.sched_getaffinity(0)
    assert found == {
        "REDKNOT_SGLANG": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_patches.models",
    }


def test_the_options_of_other_plugins_stay(plain, enabled):
    """SGLang comes with one that hooks the same function."""
    assert "--servicer-impl" in plain["options"]
    assert sorted(enabled["options"]) == sorted(plain["options"] + OURS)


def test_what_a_user_set_stays():
    mine = {
        "SGLANG_NCCL_SO_PATH": "mine",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "email",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|0",
    }
    found = look("--enable-redknot", "--device=cpu", "--tp-size=2", **mine)
    assert set(ours(found)) == {"REDKNOT_SGLANG", "SGLANG_USE_CPU_ENGINE"}


def test_help_shows_the_options_and_changes_nothing_else(plain):
    found = look("--help")
    assert sorted(found["options"]) == sorted(plain["options"] + OURS)
    assert found["hooks"] == ["sglang.srt.server_args.ServerArgs.add_cli_args"]
    assert (ours(found), found["finders"]) == ({}, [])


def test_a_rank_binds_to_one_core_each_and_one_rank_to_none(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 3})
    environment.enable_cpu(1)
    assert environment.enabled()
    assert environment._BINDING not in os.environ
    environment.enable_cpu(3)
    assert os.environ[environment._BINDING] == "3|5|3"


def test_a_build_beside_the_server_runs_no_plugin(monkeypatch):
    monkeypatch.setattr(os, "environ", {"HOME": "x", "OMP_NUM_THREADS": "16"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    environment.enable_cpu(2)
    found = environment.for_builder()
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["HOME"] == "x"
    assert not {environment.ENABLED, environment._MODELS, *environment._CPU} & set(found)
