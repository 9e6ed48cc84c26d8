"""SGLang's pools of DeepSeek-V4 as packed rows, and the only way that reused latents get into them.

A token's slot in the full pool numbers everything: a compressed entry lies in slot // ratio, and the window's slot is
looked up. Pages of 256 tokens hold 256 window latents, 64 CSA entries and keys, 2 HCA entries. Nothing is taken on
trust: a pool whose bytes are not as in ``contract.py`` is refused when it is first looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from redknot.errors import ConfigError
from redknot.latents.layout import SGLANG_PAGE_TOKENS
from redknot.model.geometry import Geometry, LayerKind
from redknot.ops.records import V4_INDEX_FP4, V4_INDEX_FP8, V4_RECORD, RowFormat, split_pages
from redknot.ops.relocate import Stored, relocate_
from redknot.ops.rope import Rotation, inverse_frequencies, rotation_at
from redknot.serving.native import require_grid
from sglang_patches.cuda.contract import index_pages, record_pages

STORES = ("window", "entries", "index")
# Of the pool: attributes, and what they are where its pages are those of the contract.
_PLAIN = {"request_window": None, "_unified_kv": False, "uniform_fp8": False}


@dataclass(frozen=True)
class Held:
    """A segment whose packed rows are to lie in native pages (``serving/native.py``: ``Placed``).

    ``rows`` [tokens] of store "window", [tokens // ratio] of the others number the rows of ``stored`` in order, of one
    layer; a store that is not named is left alone.
    """

    start: int
    first: int
    stop: int
    stored: Mapping[str, Stored]
    rows: Mapping[str, Tensor] = field(default_factory=dict)


class NativePools:
    """One rank's ``DeepSeekV4TokenToKVPool``; ConfigError where it is not laid out as the contract says."""

    def __init__(self, pool: Any, geometry: Geometry, counters: dict[str, int]) -> None:
        self._pool = pool
        self._geometry = geometry
        self._counters = counters
        for name, wanted in _PLAIN.items():
            found = getattr(pool, name, wanted)
            if found != wanted:
                raise ConfigError(f"SGLang's pool has {name} {found!r}, not {wanted!r}; leave its layout options out")
        layout = getattr(pool.kv_layout, "value", pool.kv_layout)
        if layout != "v4":
            raise ConfigError(f"SGLang's pages have the layout {layout!r}; unset SGLANG_DSV4_KV_LAYOUT")
        ratios = [geometry.ratio(layer) for layer in range(geometry.num_layers)]
        if list(pool.compression_ratios)[: len(ratios)] != ratios:
            raise ConfigError("SGLang's pool has other compression ratios than the checkpoint's config.json")
        sizes = {what: (rows, nbytes) for what, rows, nbytes, _ in record_pages()}
        self._sizes = {("window", kind): sizes["window latents"] for kind in LayerKind}
        self._sizes |= {("entries", kind): sizes[f"{kind.name} entries"] for kind in (LayerKind.CSA, LayerKind.HCA)}

    def records(self, store: str, layer: int) -> Stored | None:
        """One layer's rows of a store; None where its kind of layer has none.

        Indexer keys are fp8 or fp4, as SGLang was started; they are behind the Hadamard transform.
        """
        kind = self._geometry.kinds[layer]
        if store == "window":
            pages, rows = self._pool.get_swa_raw_buffer(layer), self._pool.get_swa_key_page_size()
        elif store == "entries" and kind is not LayerKind.SLIDING:
            pages, rows = self._pool.get_extra_key_buffer(layer), self._pool.get_extra_key_page_size(layer)
        elif store == "index" and kind is LayerKind.CSA:
            ratio = self._geometry.ratio(layer)
            pages, rows = self._pool.get_index_k_with_scale_buffer(layer), self._pool.get_index_k_page_size(ratio)
        else:
            return None
        pages = pages.view(torch.uint8)
        if store == "index":
            return Stored(split_pages(pages, self._index_format(pages, rows, layer), rows), transformed=True)
        self._same(store, layer, (rows, pages.shape[-1]), self._sizes[store, kind])
        return Stored(split_pages(pages, V4_RECORD, rows))

    def _index_format(self, pages: Tensor, rows: int, layer: int) -> RowFormat:
        known, wanted = index_pages(), SGLANG_PAGE_TOKENS // self._geometry.ratio(layer)
        for name, row_format in (("fp8", V4_INDEX_FP8), ("fp4", V4_INDEX_FP4)):
            if (rows, pages.shape[-1]) == (wanted, known[name]):
                return row_format
        raise ConfigError(
            f"layer {layer}: SGLang's index page is {rows} rows in {pages.shape[-1]} bytes, not {wanted} rows in"
            f" {known['fp8']} (fp8) or {known['fp4']} (fp4)"
        )

    def _same(self, store: str, layer: int, found: tuple[int, int], wanted: tuple[int, int]) -> None:
        if found != wanted:
            raise ConfigError(
                f"layer {layer}: SGLang's {store} page is {found[0]} rows in {found[1]} bytes, not {wanted[0]} rows in"
                f" {wanted[1]}"
            )

    def fill(self, layer: int, segments: Sequence[Held], slots: Tensor) -> None:
        """Put one layer of a request's segments into native pages; ``slots`` [tokens] are the full pool's, by position.

        Every row that is not yet at its position is turned by the distance and quantised once more, and counted as a
        rewrite. ConfigError, before anything is written, where a segment is off the grid of whole blocks, or rows are
        missing. Window rows go where the server still keeps them; those that it gave up lie in its page 0.
        """
        require_grid(segments, self._geometry.block_length, self._counters)
        work = [
            (store, target, segment)
            for store in STORES
            if (target := self.records(store, layer)) is not None
            for segment in segments
            if store in segment.rows
        ]
        for store, _, segment in work:
            wanted = len(self._places(store, layer, segment, slots))
            if len(segment.rows[store]) != wanted or segment.stop > len(slots):
                raise ConfigError(
                    f"layer {layer}: {len(segment.rows[store])} rows of store {store} for {wanted} places"
                    f" of a segment that ends at token {segment.stop} of {len(slots)}"
                )
        for store, target, segment in work:
            places = self._places(store, layer, segment, slots)
            self._counters["rewrites"] += relocate_(
                segment.stored[store], segment.rows[store], self._rotation(layer, segment), target, places
            )

    def _places(self, store: str, layer: int, segment: Held, slots: Tensor) -> Tensor:
        """Slots of a segment's rows; of groups that are whole, where a row is of a group."""
        if store == "window":
            return self._live(self._pool.translate_loc_from_full_to_swa(slots[segment.first : segment.stop]))
        ratio = self._geometry.ratio(layer)
        whole = segment.first + (segment.stop - segment.first) // ratio * ratio
        return slots[segment.first : whole : ratio] // ratio

    def _live(self, places: Tensor) -> Tensor:
        """Window slots; -1, which is not written, for those in SGLang's page 0, which is nobody's."""
        return torch.where(places < self._pool.get_swa_key_page_size(), -1, places).to(torch.int64)

    def _rotation(self, layer: int, segment: Held) -> Rotation | None:
        """The turn from where a segment was computed to where it stands, one for all its rows; None: it stays."""
        distance = segment.first - segment.start
        if not distance:
            return None
        frequencies = inverse_frequencies(self._geometry.rope(layer), self._geometry.rope_dim)
        turn, device = rotation_at(torch.tensor([distance]), frequencies), self._pool.get_swa_raw_buffer(layer).device
        return Rotation(turn.cos.to(device), turn.sin.to(device))
