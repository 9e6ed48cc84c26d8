"""Requests and responses in the process that speaks HTTP: what a client may say, whose it is, and its report."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from redknot.errors import InputError
from redknot.serving.batch import Ask
from sglang_patches.launch import options_of
from sglang_patches.options import Options
from sglang_patches.requests import ARRIVED, NAMESPACE
from sglang_patches.responses import KEY

_DONE = "data: [DONE]"

# Reports of the request that this task answers, by choice: a stream's own generator has no other place for them.
_reports: ContextVar[dict[int, Any] | None] = ContextVar("redknot_reports", default=None)


async def generate(
    original: Callable[..., Any], manager: Any, received: Any, request: Any = None
) -> AsyncIterator[Any]:
    """Hook: around every request of every endpoint. ValueError, which is a 400, for one that cannot be served."""
    if hasattr(received, "sampling_params"):
        _refuse(received)
        _refuse_other_tokens(received, options_of(manager.server_args))
        received.sampling_params = _stamped(received.sampling_params, _namespace(manager, request))
    async for output in original(manager, received, request):
        for number, item in enumerate(output if isinstance(output, list) else [output]):
            _flatten_report(item, number)
        yield output


# Of a request: what it means when it is set, and cannot be answered rightly by rows that may not have run.
_REFUSED = {
    "input_embeds": "embeddings as input",
    "positional_embed_overrides": "embeddings as input",
    "return_hidden_states": "hidden states",
    "return_routed_experts": "routed experts",
    "return_indexer_topk": "indexer choices",
    "session_params": "sessions",
    "image_data": "images",
    "video_data": "videos",
    "audio_data": "audio",
}


def _refuse(received: Any) -> None:
    """ValueError for what cannot be had."""
    for name, meaning in _REFUSED.items():
        if getattr(received, name, None):
            raise ValueError(f"{meaning} cannot be had with --enable-redknot")
    # Requests for embeddings, which SGLang is about to refuse, have neither field.
    wanted, start = getattr(received, "return_logprob", None), getattr(received, "logprob_start_len", None)
    starts = start if isinstance(start, list) else [start]
    if wanted and any(one is not None and one >= 0 for one in starts):
        raise ValueError("logprobs of the prompt cannot be had with --enable-redknot: not all of its rows run")


def _refuse_other_tokens(received: Any, options: Options | None) -> None:
    """ValueError for logprobs of tokens that the model does not have; the sampler of every rank would end over them."""
    if options is None:
        return
    vocab = options.geometry.vocab_size
    for number in _flat(getattr(received, "top_logprobs_num", None)):
        if not 0 <= number <= vocab:
            raise ValueError(f"top_logprobs_num is {number}; the model has {vocab} tokens")
    for token in _flat(getattr(received, "token_ids_logprob", None)):
        if not 0 <= token < vocab:
            raise ValueError(f"token_ids_logprob holds {token}; the model has {vocab} tokens")


def _flat(given: Any) -> Iterator[int]:
    """The numbers in what is a number, a list of them, or one such for each prompt."""
    if isinstance(given, list):
        for one in given:
            yield from _flat(one)
    elif isinstance(given, int):
        yield given


def _namespace(manager: Any, request: Any) -> str | None:
    """The namespace that the API key of a request stands for."""
    found = None if request is None else request.scope.get(NAMESPACE)
    options = options_of(manager.server_args)
    return found if found is not None or options is None else options.config.namespace


def _stamped(params: Any, namespace: str | None) -> Any:
    """Sampling parameters whose wish for reuse is well formed, with the namespace that no client can set."""
    if isinstance(params, list):
        return [_stamped(one, namespace) for one in params]
    params = dict(params or {})
    custom = params.get("custom_params")
    if custom is not None and not isinstance(custom, Mapping):
        raise ValueError("custom_params must be an object")
    custom = dict(custom or {})
    try:
        Ask.parse(custom.get(KEY))
    except InputError as error:
        raise ValueError(str(error)) from None
    custom[NAMESPACE], custom[ARRIVED] = namespace, time.perf_counter()
    params["custom_params"] = custom
    return params


def _flatten_report(item: Any, number: int) -> None:
    """Put the one report of a request where SGLang has a list with an entry for each of its forwards."""
    info = item.get("meta_info") if isinstance(item, dict) else None
    if not info or KEY not in info:
        return
    found = info[KEY]
    if isinstance(found, list):
        info[KEY] = next((one for one in found if one is not None), None)
    kept = _reports.get()
    if kept is not None:
        kept[item.get("index", number)] = info[KEY]


def add_to_metadata(result: Any, _: Any, __: Any, returned: list[dict[str, Any]], *___: Any, **____: Any) -> Any:
    """Hook: after an OpenAI response was made; one report for each of its choices."""
    if result is not None and getattr(result, "metadata", None) is not None:
        result.metadata[KEY] = [one["meta_info"].get(KEY) for one in returned]
    return result


async def stream(
    original: Callable[..., Any], handler: Any, adapted: Any, request: Any, raw: Any
) -> AsyncIterator[str]:
    """Hook: around an OpenAI stream; the reports come as a chunk of their own in front of the end."""
    token = _reports.set({})
    first: dict[str, Any] = {}
    try:
        async for line in original(handler, adapted, request, raw):
            if line.startswith(_DONE):
                kept = _reports.get() or {}
                if first:
                    yield f"data: {json.dumps(_chunk(first, kept))}\n\n"
            elif not first:
                first = _parsed(line)
            yield line
    finally:
        try:
            _reports.reset(token)
        except ValueError:  # a stream that its client left is closed in another task
            _reports.set(None)


def _parsed(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line.removeprefix("data: "))
    except ValueError:
        return {}
    return found if isinstance(found, dict) and "id" in found else {}


def _chunk(first: Mapping[str, Any], reports: Mapping[int, Any]) -> dict[str, Any]:
    kept = {name: first.get(name) for name in ("id", "object", "created", "model")}
    return kept | {"choices": [], "metadata": {KEY: [reports[index] for index in sorted(reports)]}}
