"""SGLang's own trees of prefixes and page allocator, as they are installed, behind the calls of the policy benchmark.

The unified tree is what a server of 0.5.23 builds unless an option says otherwise (``default_radix_cache_factory``),
here for a model of full attention alone. Its core is in Rust where SGLang finds that extension, and in Python where
not. ``RadixCache`` is the tree in Python that only special kinds of models still get.

Of what SGLang does around them this leaves out the scheduler and the table of token slots. A request matches and locks
a path, makes room by eviction, allocates pages, and inserts its whole prompt as after a prefill; an answer's blocks go
into the tree when the request ends, as SGLang does it, so that growing is an allocation. A fork locks the path again
and takes pages for what is not in the tree yet.

Both import on a machine without a GPU as long as SGLANG_USE_CPU_ENGINE is not set: with it SGLang wants CPU kernels,
which its wheels do not have.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


def missing() -> str | None:
    """Why SGLang cannot be measured here; None when it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels that this machine cannot run, and nothing here calls
            import sglang.srt.mem_cache.radix_cache
            import sglang.srt.mem_cache.unified_radix_cache  # noqa: F401
    except ImportError as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return None


def installed() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        import sglang

        return str(sglang.__version__)


def sides(blocks: int, block_tokens: int) -> dict[str, Callable[[], RadixSide]]:
    """What makes a fresh side, by its name."""
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import select_tree_core_backend

    core = select_tree_core_backend(_parameters(blocks, block_tokens))
    return {
        f"SGLang, unified tree, {core}": lambda: RadixSide(blocks, block_tokens, unified=True),
        "SGLang, RadixCache": lambda: RadixSide(blocks, block_tokens, unified=False),
    }


def _parameters(blocks: int, block_tokens: int) -> Any:
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    pages = PagedTokenToKVPoolAllocator(
        blocks * block_tokens, block_tokens, torch.float32, "cpu", None, need_sort=False
    )
    return CacheInitParams(False, None, pages, block_tokens, tree_components=(ComponentType.FULL,))


@dataclass
class _Request:
    tokens: array[int]  # of its full blocks
    lock: Any  # of the path to the last that the tree holds
    slots: torch.Tensor  # one for each token of its full blocks
    open: torch.Tensor  # of its open block
    inserted: int = 0  # tokens that the tree holds


class RadixSide:
    """Prompts are arrays of token ids; pages are blocks."""

    def __init__(self, blocks: int, block_tokens: int, *, unified: bool) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.hits = 0
        self._page = block_tokens
        self._kinds = (InsertParams, MatchPrefixParams, RadixKey)
        parameters = _parameters(blocks, block_tokens)
        self._pages = parameters.token_to_kv_pool_allocator
        self._tree = (UnifiedRadixCache if unified else RadixCache)(parameters)
        self._frees_itself = unified  # what an insertion brings twice
        self._requests: dict[int, _Request] = {}

    def arrive(self, request: int, tokens: array[int]) -> None:
        _, match_params, radix_key = self._kinds
        node = self._tree.match_prefix(match_params(key=radix_key(tokens))).last_device_node
        lock = self._tree.lock(node)
        known = self._tree.path_device_indices(node)
        self.hits += len(known) // self._page
        slots = torch.cat((known, self._take(len(tokens) - len(known))))
        self._requests[request] = live = _Request(tokens, lock, slots, self._take(self._page), len(known))
        self._insert(live)

    def grow(self, request: int, tokens: array[int]) -> None:
        live = self._requests[request]
        live.tokens = live.tokens + tokens
        live.slots = torch.cat((live.slots, live.open))
        live.open = self._take(self._page)

    def fork(self, request: int, other: int) -> None:
        """The blocks that are in the tree are shared; the others of a growing answer are held twice."""
        live = self._requests[request]
        lock = self._tree.lock(live.lock.node)
        own = self._take(len(live.slots) - live.inserted)
        slots = torch.cat((live.slots[: live.inserted], own))
        self._requests[other] = _Request(live.tokens, lock, slots, self._take(self._page), live.inserted)

    def finish(self, request: int, _: object) -> None:
        live = self._requests.pop(request)
        self._insert(live)
        self._tree.unlock(live.lock)
        self._pages.free_segment(live.open, start_pos=0)

    def recount(self) -> list[str]:
        """What is wrong once no request lives: every page is free or may be evicted, and none is locked."""
        free, evictable, locked = self._pages.available_size(), self._tree.evictable_size(), self._tree.protected_size()
        total = self._pages.size
        return [] if free + evictable == total and not locked else [f"{free=} {evictable=} {locked=} {total=}"]

    def _insert(self, live: _Request) -> None:
        """Give the tree a request's full blocks, take what it had already, and lock the whole path."""
        insert_params, _, radix_key = self._kinds
        before = live.inserted
        if before == len(live.tokens):
            return
        result = self._tree.insert(
            insert_params(key=radix_key(live.tokens), value=live.slots, prev_prefix_len=before, inserted_len=before)
        )
        if not self._frees_itself:
            self._pages.free_segment(live.slots[before : result.prefix_len], start_pos=before)
        lock = self._tree.lock(result.last_device_node)
        self._tree.unlock(live.lock)
        live.lock, live.inserted = lock, len(live.tokens)
        live.slots = self._tree.path_device_indices(lock.node)

    def _take(self, tokens: int) -> torch.Tensor:
        self._pages.evict_to_free_tokens(self._tree, tokens)
        taken = self._pages.alloc(tokens)
        if taken is None:
            raise RuntimeError(f"SGLang's pool has no room for {tokens} tokens; the trace asks for too much")
        return taken
