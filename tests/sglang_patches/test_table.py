"""Every hook has its target in the installed SGLang, with the parameters that our functions take."""

from __future__ import annotations

import pytest

from sglang_patches.hooks import Process
from sglang_patches.table import HOOKS, OPTIONS, hooks_of
from tests.kit import child

SRT = "sglang.srt."
OPENAI = SRT + "entrypoints.openai."
POOL = SRT + "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator."
PARTS = SRT + "managers.scheduler_components."

# Target -> kind and parameters (=: by keyword only). A release that changes one of them must be looked at.
WANTED = {
    "sglang.cli.utils.get_is_diffusion_model": ("function", "model_path"),
    SRT + "server_args.ServerArgs.add_cli_args": ("staticmethod", "parser"),
    SRT + "server_args.ServerArgs.from_cli_args": ("classmethod", "args"),
    SRT + "server_args.ServerArgs.resolve_once": ("method", "self"),
    SRT + "managers.tokenizer_manager.TokenizerManager.generate_request": (
        "async generator method",
        "self obj request",
    ),
    OPENAI + "serving_chat.OpenAIServingChat._build_chat_response": ("method", "self request ret created"),
    OPENAI + "serving_completions.OpenAIServingCompletion._build_completion_response": (
        "method",
        "self request ret created",
    ),
    OPENAI + "serving_chat.OpenAIServingChat._generate_chat_stream": (
        "async generator method",
        "self adapted_request request raw_request",
    ),
    OPENAI + "serving_completions.OpenAIServingCompletion._generate_completion_stream": (
        "async generator method",
        "self adapted_request request raw_request",
    ),
    SRT + "entrypoints.http_server._setup_and_run_http_server": (
        "function",
        "server_args tokenizer_manager template_manager port_args scheduler_infos subprocess_watchdog"
        " execute_warmup_func launch_callback",
    ),
    PARTS + "internal_state.SchedulerInternalStateController.get_internal_state": ("method", "self recv_req"),
    SRT + "model_executor.forward_batch_info.ForwardBatch.init_new": (
        "classmethod",
        "batch model_runner =capture_hidden_mode =return_hidden_states_before_norm =extend_position_info"
        " =spec_mrope_positions =kv_loc_plan =write_cols",
    ),
    SRT + "managers.scheduler.Scheduler._create_generation_req": ("method", "self recv_req *args **kwargs"),
    SRT + "mem_cache.common.release_kv_cache": ("function", "req tree_cache =checkpoint"),
    SRT + "managers.scheduler.Scheduler._release_aborted_request": ("method", "self req"),
    POOL + "_release_page_ids": ("method", "self *page_ids"),
    POOL + "clear": ("method", "self"),
    PARTS + "output_streamer.SchedulerOutputStreamer.is_request_level_customized_info_key": ("method", "self key"),
}


@pytest.mark.parametrize("target", [hook.target for hook in HOOKS])
def test_the_installed_sglang_has_the_target(target, installed):
    found = installed.targets[target]
    kind, parameters = WANTED[target]
    assert (found["kind"], found["parameters"]) == (kind, parameters.split())


def test_nothing_else_is_wanted_and_no_target_is_hooked_twice():
    assert sorted(hook.target for hook in HOOKS) == sorted(WANTED)


def test_every_hook_says_why():
    assert all(hook.why and hook.kind in ("BEFORE", "AFTER", "AROUND") for hook in HOOKS)
    assert set(OPTIONS) <= set(hooks_of(Process.PARENT))
    assert {hook.target for kind in Process for hook in hooks_of(kind)} == set(WANTED)


_APPLY = """
import sys
from redknot.errors import ConfigError
from sglang_patches.hooks import Hook, Process, apply
def nothing(*words, **more): return None
try:
    apply([Hook(target, kind, Process.PARENT, "a test", nothing) for target, kind in {hooks!r}])
except ConfigError as error:
    print(error)
"""


def applied(*hooks: tuple[str, str]) -> str:
    done = child.python(_APPLY.replace("{hooks!r}", repr(hooks)))
    assert done.code == 0, done.err
    return done.out


def test_a_missing_target_is_refused_by_name():
    there = "sglang.srt.plugins.load_plugins_by_group"
    said = applied(
        (there, "AFTER"),
        ("sglang.srt.plugins.gone", "AFTER"),
        ("sglang.nowhere.gone", "BEFORE"),
        ("sglang.srt.plugins.hook_registry.HookSource", "AROUND"),  # a class cannot be wrapped
    )
    assert said.startswith("this SGLang has no sglang.srt.plugins.gone (")
    assert "sglang.nowhere.gone (" in said
    assert "HookSource (" in said
    assert there not in said
    assert said.endswith("; the plugin cannot serve with it\n")
    assert said.count("\n") == 1
