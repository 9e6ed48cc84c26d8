"""The hooks of a server on a CUDA device: those of the CPU, of which three know the native model, and three more."""

from __future__ import annotations

from sglang_patches.cuda import requests
from sglang_patches.hooks import Hook, Process
from sglang_patches.table import HOOKS, as_markdown

_SRT = "sglang.srt."
_ALLOCATOR = _SRT + "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator."
_RUNNER = _SRT + "model_executor.runner."

OWN = [
    Hook(
        _SRT + "managers.scheduler.Scheduler._create_generation_req",
        "AROUND",
        Process.CHILD,
        "decides whose a request is, before the prefix is looked up; a prefix of native pages is none of the engine's",
        requests.create,
    ),
    Hook(
        _ALLOCATOR + "_release_page_ids",
        "BEFORE",
        Process.CHILD,
        "tells which pages of tokens were freed, not those of windows; a page holds two of the engine's",
        requests.freed,
    ),
    Hook(_ALLOCATOR + "clear", "BEFORE", Process.CHILD, "tells that all of them were freed", requests.cleared),
    Hook(
        _SRT + "managers.schedule_policy.PrefillAdder.add_one_req",
        "AROUND",
        Process.CHILD,
        "keeps prefills that reuse and native ones in batches of their own",
        requests.keep_apart,
    ),
    Hook(
        _RUNNER + "decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph",
        "AROUND",
        Process.CHILD,
        "runs decode steps with one of ours without a captured graph, which would not ask the model",
        requests.can_run_graph,
    ),
    Hook(
        _RUNNER + "prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph",
        "AROUND",
        Process.CHILD,
        "the same of prefills",
        requests.can_run_graph,
    ),
]


def hooks_of(process: Process) -> list[Hook]:
    """The hooks of one kind of process."""
    own = {hook.target for hook in OWN}
    return [hook for hook in [*HOOKS, *OWN] if hook.process is process and (hook in OWN or hook.target not in own)]


if __name__ == "__main__":
    print(as_markdown(OWN))
