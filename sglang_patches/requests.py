"""Requests on their way in: what a client asked for, the branch of the radix tree, and what a batch runs of them."""

from __future__ import annotations

import logging
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from redknot.errors import RedKnotError
from redknot.serving.batch import Admission, Ask
from sglang_patches.responses import KEY
from sglang_patches.serving import engine

if TYPE_CHECKING:
    from redknot.serving.engine import ServingEngine

_log = logging.getLogger(__name__)

REQUESTS = "redknot_requests"  # in a batch's model_specific_states
# In custom_params, put there by the process that speaks HTTP, whatever a client wrote.
NAMESPACE = "redknot_namespace"
ADMISSION = "redknot_admission"  # attribute of a request that was admitted
ARRIVED = "redknot_arrived"  # on the clock of time.perf_counter, which the processes of a machine share
_HEALTH = "HEALTH_CHECK"  # begins the id of a request that SGLang sends to itself


def create(original: Callable[..., Any], scheduler: Any, received: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook: around the making of a request in every rank."""
    return make(original, scheduler, received, args, kwargs, cached)


def make(
    original: Callable[..., Any],
    scheduler: Any,
    received: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    pages_of: Callable[..., Sequence[int]],
) -> Any:
    """Make a request and admit it; ``pages_of`` says what the prefix cache has, as :func:`cached` does."""
    request = original(scheduler, received, *args, **kwargs)
    found = engine()
    if found is None:
        return request
    try:
        admission = _admit(found, scheduler, request, pages_of)
    except RedKnotError as error:
        request.set_finish_with_abort(str(error))
        return request
    except Exception as error:  # noqa: BLE001  one that leaves this hook ends every rank, and the server with them
        _log.exception("request %s could not be admitted", request.rid)
        message = f"{type(error).__name__}: {error}"
        request.set_finish_with_abort(message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
        return request
    setattr(request, ADMISSION, admission)
    # However a request ends, nothing of it is left when SGLang has let go of it.
    weakref.finalize(request, found.release, request.rid, admission=admission)
    return request


def _admit(found: ServingEngine, scheduler: Any, request: Any, pages_of: Callable[..., Sequence[int]]) -> Admission:
    ids = request.origin_input_ids
    custom = request.sampling_params.custom_params or {}
    ask = Ask.parse(custom.get(KEY))
    if request.rid.startswith(_HEALTH):
        ask = Ask(reuse="off")
    own = request.extra_key

    def pages(branch: str | None) -> Sequence[int]:
        return pages_of(scheduler, ids, _joined(own, branch), request.cache_salt)

    namespace = custom.get(NAMESPACE)
    admission = found.admit(request.rid, ids, ask, namespace=namespace, arrived=custom.get(ARRIVED), cached_pages=pages)
    request.extra_key = _joined(own, admission.extra_key)
    return admission


def _joined(own: str | None, branch: str | None) -> str | None:
    """A client's extra key keeps requests apart, and so does ours; no client can spell the name of a branch of ours."""
    if own is None and branch is None:
        return None
    client = "-" if own is None else f"{len(own)}:{own}"
    return client if branch is None else f"{client}+{branch}"


def cached(scheduler: Any, ids: array[int], key: str | None, salt: str | None) -> list[int]:
    """Pages of the longest prefix that the tree has, the last token left out as SGLang does it."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tree = scheduler.tree_cache
    size = tree.page_size
    found = tree.match_prefix(
        MatchPrefixParams(key=RadixKey(ids, extra_key=key, limit=max(len(ids) - 1, 0), cache_salt=salt))
    )
    if not found.device_prefix_len:
        return []
    # The tree reads these of a request: where its match ends, and which root its branch has.
    matched = SimpleNamespace(
        rid="", prefix_len=found.device_prefix_len, last_node=found.last_device_node, extra_key=key, cache_salt=salt
    )
    slots = tree.prefix_device_indices(matched)[::size]
    pages: list[int] = (slots // size).tolist()
    return pages


def with_requests(result: Any, _: type, batch: Any, *__: Any, **___: Any) -> Any:
    """Hook: after a batch was made for the model; any other attribute than this is lost on the way."""
    states = dict(result.model_specific_states or {})
    states[REQUESTS] = list(batch.reqs)
    result.model_specific_states = states
    return result


def release(request: Any, *_: Any, **__: Any) -> None:
    """Hook: before a request's row is given back; one that is not finished was retracted, and comes again."""
    found = engine()
    if found is not None:
        found.release(request.rid, ended=request.finished())


def aborted(_: Any, request: Any) -> None:
    """Hook: before SGLang drops a request that waits, or is being prefilled in chunks; it tells nobody else."""
    found = engine()
    if found is not None:
        found.release(request.rid)


def fail(request: Any, message: str) -> None:
    """End one request with an error, without its pages entering the tree; every rank does the same."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    # A prefill's result is looked up in the first, a decode step's in the second.
    request.discard_output_reason = request.to_finish = FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR)
    request.skip_radix_cache_insert = True
