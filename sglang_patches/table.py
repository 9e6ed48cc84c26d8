"""The hooks of the plugin. Each names what would not work without it."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_patches import embedded, http, launch, pages, requests, responses, state, traffic
from sglang_patches.hooks import Hook, Process

_SRT = "sglang.srt."
_OPENAI = _SRT + "entrypoints.openai."

OPTIONS = [
    Hook(
        _SRT + "server_args.ServerArgs.add_cli_args",
        "AFTER",
        Process.PARENT,
        "adds the four options, so that they parse and show in --help",
        launch.add_cli_args,
    ),
]

HOOKS = [
    *OPTIONS,
    Hook(
        _SRT + "server_args.ServerArgs.from_cli_args",
        "AROUND",
        Process.PARENT,
        "checks our options, sets what this model needs of SGLang's, and lets both travel to the ranks",
        launch.from_cli_args,
    ),
    Hook(
        "sglang.cli.utils.get_is_diffusion_model",
        "AROUND",
        Process.PARENT,
        "keeps `sglang serve --model-path nano` from asking a model hub about that name",
        launch.is_diffusion,
    ),
    Hook(
        # Not the constructor: msgspec keeps its own reference to that, and to __post_init__.
        _SRT + "server_args.ServerArgs.resolve_once",
        "BEFORE",
        Process.PARENT,
        "does the same for the arguments of an Engine, which no command line made",
        embedded.attach,
    ),
    Hook(
        _SRT + "managers.tokenizer_manager.TokenizerManager.generate_request",
        "AROUND",
        Process.PARENT,
        "refuses a malformed wish with a 400, stamps the namespace of the API key, and flattens reports",
        traffic.generate,
    ),
    Hook(
        _OPENAI + "serving_chat.OpenAIServingChat._build_chat_response",
        "AFTER",
        Process.PARENT,
        "puts the reports into the response's metadata",
        traffic.add_to_metadata,
    ),
    Hook(
        _OPENAI + "serving_completions.OpenAIServingCompletion._build_completion_response",
        "AFTER",
        Process.PARENT,
        "puts the reports into the response's metadata",
        traffic.add_to_metadata,
    ),
    Hook(
        _OPENAI + "serving_chat.OpenAIServingChat._generate_chat_stream",
        "AROUND",
        Process.PARENT,
        "sends the reports in front of the end of a stream",
        traffic.stream,
    ),
    Hook(
        _OPENAI + "serving_completions.OpenAIServingCompletion._generate_completion_stream",
        "AROUND",
        Process.PARENT,
        "sends the reports in front of the end of a stream",
        traffic.stream,
    ),
    Hook(
        _SRT + "entrypoints.http_server._setup_and_run_http_server",
        "BEFORE",
        Process.PARENT,
        "adds the routes below /redknot and the API keys of the namespaces",
        http.set_up,
    ),
    Hook(
        _SRT + "managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
        "AFTER",
        Process.CHILD,
        "lets the HTTP process ask whether reuse is on",
        state.internal_state,
    ),
    Hook(
        _SRT + "model_executor.forward_batch_info.ForwardBatch.init_new",
        "AFTER",
        Process.CHILD,
        "gives the model the requests of a batch: their whole token ids, and where a chunk ends",
        requests.with_requests,
    ),
    Hook(
        _SRT + "managers.scheduler.Scheduler._create_generation_req",
        "AROUND",
        Process.CHILD,
        "plans reuse before the prefix is looked up, and chooses the branch of the radix tree",
        requests.create,
    ),
    Hook(
        _SRT + "mem_cache.common.release_kv_cache",
        "BEFORE",
        Process.CHILD,
        "gives back what a request holds when it ends or is retracted",
        requests.release,
    ),
    Hook(
        _SRT + "managers.scheduler.Scheduler._release_aborted_request",
        "BEFORE",
        Process.CHILD,
        "gives back what a request holds that is aborted while it waits; Python may collect it much later",
        requests.aborted,
    ),
    Hook(
        _SRT + "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator._release_page_ids",
        "BEFORE",
        Process.CHILD,
        "tells which pages were freed; no other call sees all of them",
        pages.freed,
    ),
    Hook(
        _SRT + "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.clear",
        "BEFORE",
        Process.CHILD,
        "tells that all pages were freed (flush_cache)",
        pages.cleared,
    ),
    Hook(
        _SRT
        + "managers.scheduler_components.output_streamer.SchedulerOutputStreamer.is_request_level_customized_info_key",
        "AROUND",
        Process.CHILD,
        "keeps the report of a request whole, instead of cutting it up by token",
        responses.is_request_level,
    ),
]


def hooks_of(process: Process) -> list[Hook]:
    """The hooks of one kind of process."""
    return [hook for hook in HOOKS if hook.process is process]


def as_markdown(hooks: Sequence[Hook] = HOOKS) -> str:
    """A table of the documentation."""
    lines = ["| target | kind | process | why |", "|---|---|---|---|"]
    lines += [
        f"| `{hook.target.removeprefix(_SRT)}` | {hook.kind.lower()} | {hook.process} | {hook.why} |" for hook in hooks
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown())
