"""Where the latents of a model lie and what they weigh: arithmetic over its geometry, without tensors.

Two shapes are laid out. *Blocks* hold the compressed entries of a fixed number of tokens and are
paged: the least common multiple of the compression ratios, so that no block ends inside a group. The *state* of a
request is what goes with a place in it: the latents of the sliding window and the compressor's rows of groups that
later tokens complete. It is kept once per request, at checkpoints and at a document's end, and counted by itself.

Bytes are exact. Where an entry stands for several tokens, bytes per token are fractions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from redknot.latents.formats import NamedRow, Precision, RegionName, Row, latent_shape, require, round_up
from redknot.model.geometry import Geometry, LayerKind

SGLANG_PAGE_TOKENS = 256  # SGLang 0.5.23 asserts it for DeepSeek-V4 on CUDA


def block_tokens(ratios: Iterable[int], page_tokens: int = 1) -> int:
    """Tokens in a block: whole groups of every ratio (0: no groups), and whole pages of the kernels that read it.

    128 for V4 (ratios 0, 4, 128). V3-style MLA has an entry a token, and its kernels page by 64.
    """
    return math.lcm(page_tokens, *(ratio for ratio in ratios if ratio))


def expansion(heads: int, nope_dim: int, value_dim: int, latent_dim: int, key_rope_dim: int = 0) -> Fraction:
    """How many times larger per-head keys and values are than the latent they are made from, in elements.

    A key counts with its RoPE part where ``key_rope_dim`` is given; V3 shares that part between its heads.
    """
    return Fraction(heads * (nope_dim + key_rope_dim + value_dim), latent_dim)


@dataclass(frozen=True)
class Size:
    """Bytes, twice: the values alone, and all that is stored (with scales, padding and alignment)."""

    values: Fraction
    stored: Fraction

    def __add__(self, other: Size) -> Size:
        """Both sums."""
        return Size(self.values + other.values, self.stored + other.stored)

    def __mul__(self, count: int | Fraction) -> Size:
        """``count`` times as much."""
        return Size(self.values * count, self.stored * count)


def total(sizes: Iterable[Size]) -> Size:
    """The sum of sizes."""
    return sum(sizes, Size(Fraction(0), Fraction(0)))


@dataclass(frozen=True)
class Region:
    """Equal rows one behind the other; ``offset`` is counted in bytes from the start of the block."""

    name: RegionName
    row: Row
    rows: int
    offset: int

    @property
    def length(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row.nbytes

    @property
    def end(self) -> int:
        """Offset of the byte behind the last row."""
        return self.offset + self.length


@dataclass(frozen=True)
class Block:
    """Bytes for ``tokens`` tokens of one layer: in each region one row for every ``ratio`` tokens.

    A region starts at the first multiple of ``alignment`` bytes behind the one before it; the whole is padded to a
    multiple of ``multiple`` bytes. No regions, no bytes.
    """

    tokens: int
    ratio: int
    regions: tuple[Region, ...]
    alignment: int
    multiple: int

    @property
    def nbytes(self) -> int:
        """Bytes of the block, padding included."""
        return round_up(self.regions[-1].end, self.multiple) if self.regions else 0

    @property
    def size(self) -> Size:
        """What the block weighs."""
        values = sum(region.length for region in self.regions if region.name.holds_values)
        return Size(Fraction(values), Fraction(self.nbytes))

    @property
    def per_token(self) -> Size:
        """The same for one token."""
        return self.size * Fraction(1, self.tokens)

    @property
    def per_row(self) -> Size:
        """What the rows of one entry weigh, without the alignment of regions."""
        values = sum(region.row.nbytes for region in self.regions if region.name.holds_values)
        return Size(Fraction(values), Fraction(sum(region.row.nbytes for region in self.regions)))

    def __post_init__(self) -> None:
        """Refuse a block that splits a group, a region or a number."""
        for name in ("tokens", "ratio", "alignment", "multiple"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be positive")
        text = f"{self.tokens} tokens would split a group of {self.ratio}"
        require(self.tokens % self.ratio == 0, text)
        end = 0
        for region in self.regions:
            text = f"{region.name} has {region.rows} rows for {self.tokens} tokens of {self.ratio} a row"
            require(region.rows == self.tokens // self.ratio, text)
            text = f"{region.name} starts at byte {region.offset} and cuts the region that ends at byte {end}"
            require(region.offset >= end, text)
            text = f"{region.name} starts at byte {region.offset}, not at the next multiple of {self.alignment}"
            require(region.offset == round_up(end, self.alignment), text)
            width = region.row.width
            text = f"an alignment of {self.alignment} bytes cuts the {width}-byte values of {region.name}"
            require(region.offset % width == 0, text)
            text = f"blocks of {self.nbytes} bytes cut the {width}-byte values of {region.name} in the one behind"
            require(self.nbytes % width == 0, text)
            end = region.end


def pack(tokens: int, ratio: int, rows: Sequence[NamedRow], alignment: int = 1, multiple: int | None = None) -> Block:
    """Lay regions out one behind the other; without ``multiple`` the whole is padded to the alignment."""
    regions: list[Region] = []
    for name, row in rows:
        require(alignment > 0 and ratio > 0, f"alignment {alignment} and ratio {ratio} must be positive")
        offset = round_up(regions[-1].end, alignment) if regions else 0
        regions.append(Region(name, row, tokens // ratio, offset))
    return Block(tokens, ratio, tuple(regions), alignment, alignment if multiple is None else multiple)


@dataclass(frozen=True)
class LayerLayout:
    """What a layer of one kind keeps."""

    kind: LayerKind
    ratio: int  # tokens per entry, 0 on sliding layers
    entries: Block  # the compressed entries and indexer keys of one block; without regions on sliding layers
    window: Block  # window latents of as many tokens, for stores that keep them all
    last_window: Block  # those of a whole window: state
    tail: Block  # the compressor's rows, as many as decoding needs at most: state

    @property
    def overlaps(self) -> bool:
        """Whether an entry also pools the group before its own."""
        return self.kind is LayerKind.CSA

    def tail_rows(self, tokens: int) -> int:
        """Compressor rows that decoding needs behind ``tokens`` tokens: the open group's, and the overlapping one's."""
        if not self.ratio:
            return 0
        return tokens % self.ratio + (self.ratio if self.overlaps and tokens >= self.ratio else 0)

    def pages(self, page_tokens: int) -> dict[str, Block]:
        """The pages of SGLang's stores (window, entries, index): all data rows, all scale rows, padding.

        A page of records is padded to a multiple of its data row (576 bytes for V4), one of indexer keys is not.
        """
        found = {}
        for store, block in (("window", self.window), ("entries", self.entries), ("index", self.entries)):
            indexed = store == "index"
            rows = [(region.name, region.row) for region in block.regions if region.name.of_indexer is indexed]
            if rows:
                found[store] = pack(page_tokens, block.ratio, rows, multiple=1 if indexed else rows[0][1].nbytes)
        return found


@dataclass(frozen=True)
class State:
    """What goes with one place in a sequence, over all layers."""

    window: Size
    tail: Size


@dataclass(frozen=True)
class ModelLayout:
    """The compression map of a model: what each of its layers keeps, in one precision."""

    geometry: Geometry
    precision: Precision
    block_tokens: int
    kinds: tuple[LayerLayout, ...]  # of the kinds that the model has, in the order of LayerKind

    @property
    def layers(self) -> tuple[LayerLayout, ...]:
        """One layout a layer."""
        by_kind = {layout.kind: layout for layout in self.kinds}
        return tuple(by_kind[kind] for kind in self.geometry.kinds)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each layer's entries start in the bytes of one block of all layers."""
        return tuple(accumulate((layout.entries.nbytes for layout in self.layers[:-1]), initial=0))

    @property
    def block(self) -> Size:
        """One block of all layers."""
        return total(layout.entries.size for layout in self.layers)

    @property
    def entries_per_token(self) -> Size:
        """Entries and indexer keys of all layers."""
        return total(layout.entries.per_token for layout in self.layers)

    @property
    def window_per_token(self) -> Size:
        """Window latents of all layers, where every row is kept."""
        return total(layout.window.per_token for layout in self.layers)

    @property
    def arena(self) -> State:
        """State that a request needs room for: a whole window, and in each layer the longest tail."""
        return State(
            total(layout.last_window.size for layout in self.layers), total(layout.tail.size for layout in self.layers)
        )

    @property
    def checkpoint(self) -> State:
        """State on a block boundary with a whole window before it: no group is open, CSA still overlaps."""
        return self.state(round_up(self.geometry.window, self.block_tokens))

    def state(self, tokens: int) -> State:
        """The rows of state behind a document of ``tokens`` tokens."""
        window = min(tokens, self.geometry.window)
        return State(
            total(layout.last_window.per_row * window for layout in self.layers),
            total(layout.tail.per_row * layout.tail_rows(tokens) for layout in self.layers),
        )

    def entries(self, tokens: int) -> Size:
        """Entries of a document: the values that exist (the last group of a ratio may be partial), in whole blocks."""
        rows = total(layout.entries.per_row * -(-tokens // layout.entries.ratio) for layout in self.layers)
        return Size(rows.values, self.block.stored * -(-tokens // self.block_tokens))

    def pages(self, page_tokens: int = SGLANG_PAGE_TOKENS) -> dict[LayerKind, dict[str, Block]]:
        """SGLang's pages of each kind of layer; a page holds whole blocks."""
        require(page_tokens > 0, f"a page of {page_tokens} tokens; it must be positive")
        text = f"a page of {page_tokens} tokens would split a block of {self.block_tokens}"
        require(page_tokens % self.block_tokens == 0, text)
        return {layout.kind: layout.pages(page_tokens) for layout in self.kinds}


def model_layout(geometry: Geometry, precision: Precision, tokens: int | None = None) -> ModelLayout:
    """Lay out a model; ``tokens`` sets a block length other than the least common multiple of its ratios."""
    length = geometry.block_length if tokens is None else tokens
    kinds = []
    for kind in (kind for kind in LayerKind if kind in geometry.kinds):
        ratio = geometry.ratio(geometry.kinds.index(kind))
        indexed = kind is LayerKind.CSA
        shape = latent_shape(geometry, indexed=indexed)
        latents = shape.latent_rows(precision)
        entries = latents + shape.index_rows(precision) if ratio else ()
        raw = shape.raw_rows(overlaps=indexed) if ratio else ()
        kept = ratio * (2 if indexed else 1)  # the open group, and with overlap the one before it
        kinds.append(
            LayerLayout(
                kind,
                ratio,
                pack(length, ratio or 1, entries, precision.alignment),
                pack(length, 1, latents, precision.alignment),
                pack(geometry.window, 1, latents, precision.alignment),
                pack(kept or 1, 1, raw, precision.alignment),
            )
        )
    return ModelLayout(geometry, precision, length, tuple(kinds))
