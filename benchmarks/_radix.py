"""SGLang's own radix cache and page allocator, as they are installed, behind the calls of the policy benchmark.

Of what SGLang does around them this leaves out the scheduler and the table of token slots. A request matches and locks
a path, makes room by eviction, allocates pages, and inserts its whole prompt as after a prefill; an answer's blocks go
into the tree when the request ends, as SGLang does it, so that growing is an allocation. A fork locks the path again
and takes pages for what is not in the tree yet.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


def missing() -> str | None:
    """Why SGLang cannot be measured here; None when it can."""
    try:
        import sglang.srt.mem_cache.allocator.paged
        import sglang.srt.mem_cache.radix_cache  # noqa: F401
    except ImportError as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return None


def installed() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        import sglang

        return str(sglang.__version__)


@dataclass
class _Request:
    tokens: array[int]  # of its full blocks
    node: Any  # end of the path that is locked
    slots: torch.Tensor  # one for each token of its full blocks
    open: torch.Tensor  # of its open block
    inserted: int = 0  # tokens that the tree holds


class RadixSide:
    """Prompts are arrays of token ids; pages are blocks."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        self.hits = 0
        self._page = block_tokens
        self._kinds = (EvictParams, InsertParams, MatchPrefixParams, RadixKey)
        self._pages = PagedTokenToKVPoolAllocator(
            blocks * block_tokens, block_tokens, torch.float32, "cpu", None, need_sort=False
        )
        self._tree = RadixCache(CacheInitParams(False, None, self._pages, block_tokens))
        self._requests: dict[int, _Request] = {}

    def arrive(self, request: int, tokens: array[int]) -> None:
        _, _, match_params, radix_key = self._kinds
        found = self._tree.match_prefix(match_params(key=radix_key(tokens)))
        node = found.last_device_node
        self._tree.inc_lock_ref(node)
        known = self._tree.path_device_indices(node)
        self.hits += len(known) // self._page
        slots = torch.cat((known, self._take(len(tokens) - len(known))))
        self._requests[request] = live = _Request(tokens, node, slots, self._take(self._page), len(known))
        self._insert(live)

    def grow(self, request: int, tokens: array[int]) -> None:
        live = self._requests[request]
        live.tokens = live.tokens + tokens
        live.slots = torch.cat((live.slots, live.open))
        live.open = self._take(self._page)

    def fork(self, request: int, other: int) -> None:
        """The blocks that are in the tree are shared; the others of a growing answer are held twice."""
        live = self._requests[request]
        self._tree.inc_lock_ref(live.node)
        own = self._take(len(live.slots) - live.inserted)
        slots = torch.cat((live.slots[: live.inserted], own))
        self._requests[other] = _Request(live.tokens, live.node, slots, self._take(self._page), live.inserted)

    def finish(self, request: int, _: object) -> None:
        live = self._requests.pop(request)
        self._insert(live)
        self._tree.dec_lock_ref(live.node)
        self._pages.free_segment(live.open, start_pos=0)

    def _insert(self, live: _Request) -> None:
        """Give the tree a request's full blocks, take what it had already, and lock the whole path."""
        _, insert_params, _, radix_key = self._kinds
        if live.inserted == len(live.tokens):
            return
        result = self._tree.insert(insert_params(key=radix_key(live.tokens), value=live.slots))
        self._pages.free_segment(live.slots[live.inserted : result.prefix_len], start_pos=live.inserted)
        node = result.last_device_node
        self._tree.inc_lock_ref(node)
        self._tree.dec_lock_ref(live.node)
        live.node, live.inserted, live.slots = node, len(live.tokens), self._tree.path_device_indices(node)

    def _take(self, tokens: int) -> torch.Tensor:
        short = tokens - self._pages.available_size()
        if short > 0:
            self._tree.evict(self._kinds[0](num_tokens=short))
        taken = self._pages.alloc(tokens)
        if taken is None:
            raise RuntimeError(f"SGLang's pool has no room for {tokens} tokens; the trace asks for too much")
        return taken
