"""Requests beside a native model: which are ours, in whose batches they run, and which pages SGLang gives up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redknot.errors import ConfigError
from redknot.serving.batch import Admission
from redknot.serving.native import fits_beside, split_pages
from sglang_patches import requests
from sglang_patches.requests import ADMISSION, REQUESTS
from sglang_patches.serving import engine

# SGLang has an allocator of the same class for the pages of windows; this one numbers the tokens of a request.
_tokens: Any = None


def is_ours(request: Any) -> bool:
    """Whether the engine runs a request's rows."""
    admission: Admission | None = getattr(request, ADMISSION, None)
    return admission is not None and admission.reuses


def native_report(request: Any) -> dict[str, Any] | None:
    """What a request that the native model answers is told: why it reused nothing. None once it decodes."""
    admission: Admission | None = getattr(request, ADMISSION, None)
    if admission is None or request.output_ids:
        return None
    tokens = len(request.origin_input_ids)
    return {"arm": "dense", "reason": admission.reason, "detail": admission.detail, "prompt_tokens": tokens}


def create(original: Callable[..., Any], scheduler: Any, received: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook: around the making of a request in every rank. One that reuses nothing is not the engine's any longer."""
    global _tokens
    request = requests.make(original, scheduler, received, args, kwargs, _kept)
    found, admission = engine(), getattr(request, ADMISSION, None)
    if found is None or admission is None:
        return request
    _tokens = _allocator_of(scheduler)
    if not admission.reuses:
        found.release(request.rid)
    return request


def _kept(scheduler: Any, *key: Any) -> list[int]:
    """Pages of the longest prefix that the tree has, as far as they are the engine's; native ones are not."""
    found = engine()
    assert found is not None
    tree = scheduler.tree_cache
    pages = split_pages(requests.cached(scheduler, *key), tree.page_size // found.page_tokens)
    return pages[: next((number for number, page in enumerate(pages) if not found.has_page(page)), len(pages))]


def _allocator_of(scheduler: Any) -> Any:
    whole = scheduler.token_to_kv_pool_allocator
    if not hasattr(whole, "full_attn_allocator"):
        raise ConfigError(f"SGLang's {type(whole).__name__} has no full_attn_allocator; leave its memory options out")
    return whole.full_attn_allocator


def keep_apart(original: Callable[..., Any], adder: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook: around the choice of a request for a batch of prefills. Another kind than the batch waits."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    if not fits_beside(is_ours(request), map(is_ours, adder.can_run_list)):
        return AddReqResult.OTHER
    return original(adder, request, *args, **kwargs)


def can_run_graph(original: Callable[..., bool], runner: Any, batch: Any) -> bool:
    """Hook: around the question whether a captured graph may run a batch; it would not ask the model whose it is."""
    mine = any(is_ours(request) for request in (batch.model_specific_states or {}).get(REQUESTS, []))
    return not mine and original(runner, batch)


def freed(allocator: Any, *page_ids: Any) -> None:
    """Hook: before pages become free."""
    found = engine()
    if found is not None and allocator is _tokens:
        for ids in page_ids:
            found.free_pages(split_pages(ids.tolist(), allocator.page_size // found.page_tokens))


def cleared(allocator: Any) -> None:
    """Hook: before all pages become free."""
    found = engine()
    if found is not None and allocator is _tokens:
        found.clear_pages()
