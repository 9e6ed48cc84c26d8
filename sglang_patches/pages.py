"""What SGLang's page allocator gives up, told to the engine."""

from __future__ import annotations

from typing import Any

from sglang_patches.serving import engine


def freed(_: Any, *page_ids: Any) -> None:
    """Hook: before pages become free."""
    found = engine()
    if found is not None:
        for ids in page_ids:
            found.free_pages(ids.tolist())


def cleared(_: Any) -> None:
    """Hook: before all pages become free."""
    found = engine()
    if found is not None:
        found.clear_pages()
