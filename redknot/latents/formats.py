"""How many bytes one row of latents takes: elements, scales and the fields of a row, for each precision.

Everything follows from the widths of a model (``LatentShape``) and a ``Precision``. The quantised ones are what the
kernels of SGLang 0.5.23 read (``kernels/ops/attention/dsv4/kv_layout.py``): data rows and scale rows lie apart. A
record of V4 is 448 FP8 and 64 BF16 values (576 bytes), with 7 scales and a pad byte (8 bytes) further on in its page.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from redknot.errors import ConfigError
from redknot.model.geometry import Geometry


def require(holds: bool, message: str) -> None:
    """Refuse a format or layout that cannot be."""
    if not holds:
        raise ConfigError(f"layout: {message}")


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple that is at least ``count``."""
    return -(-count // multiple) * multiple


class Element(StrEnum):
    """How one number is stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8_e4m3"
    FP4 = "fp4_e2m1"
    UE8M0 = "ue8m0"  # a scale that is a power of two: its exponent + 127, in a byte

    @property
    def bits(self) -> int:
        """Bits of one number."""
        return _BITS[self]

    @property
    def width(self) -> int:
        """Bytes that one number must not straddle: its own, and one for two packed FP4 numbers."""
        return max(self.bits // 8, 1)


_BITS = {Element.FP32: 32, Element.BF16: 16, Element.FP8: 8, Element.FP4: 4, Element.UE8M0: 8}


class RegionName(StrEnum):
    """What the rows of a region are; a region of scales goes with the region of values that it scales."""

    LATENTS = "latents"  # window latents or compressed entries
    SCALES = "scales"
    INDEX_KEYS = "index_keys"
    INDEX_SCALES = "index_scales"
    RAW = "raw"  # the compressor's unpooled projections (kv and gate) of one token
    RAW_INDEX = "raw_index"  # the same of the indexer's compressor

    @property
    def holds_values(self) -> bool:
        """Whether the bytes are the latents' own, as opposed to what a quantised format needs beside them."""
        return self not in (RegionName.SCALES, RegionName.INDEX_SCALES)

    @property
    def of_indexer(self) -> bool:
        """Whether the indexer reads it, from a store of its own."""
        return self in (RegionName.INDEX_KEYS, RegionName.INDEX_SCALES)


@dataclass(frozen=True)
class Field:
    """Consecutive numbers of one kind inside a row."""

    name: str
    element: Element
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of the field."""
        return self.count * self.element.bits // 8

    def __post_init__(self) -> None:
        """Refuse a field that is empty or ends inside a byte."""
        require(self.count > 0, f"field {self.name} has {self.count} values; it must have some")
        text = f"field {self.name} of {self.count} {self.element} values ends inside a byte"
        require(self.count * self.element.bits % 8 == 0, text)


@dataclass(frozen=True)
class Row:
    """Fields one behind the other, padded to a multiple of ``multiple`` bytes."""

    fields: tuple[Field, ...]
    multiple: int = 1

    @property
    def used(self) -> int:
        """Bytes of the fields."""
        return sum(field.nbytes for field in self.fields)

    @property
    def nbytes(self) -> int:
        """Bytes from one row to the next."""
        return round_up(self.used, self.multiple)

    @property
    def width(self) -> int:
        """Bytes of the widest number; a row may start at its multiples only."""
        return max(field.element.width for field in self.fields)

    def offset(self, name: str) -> int:
        """Bytes before a field."""
        names = [field.name for field in self.fields]
        return sum(field.nbytes for field in self.fields[: names.index(name)])

    def __post_init__(self) -> None:
        """Refuse a row in which, or behind which, a number would be cut by an address it may not have."""
        require(bool(self.fields) and self.multiple > 0, "a row needs fields, and padding to a positive multiple")
        for field in self.fields:
            text = f"field {field.name} starts at byte {self.offset(field.name)}, which cuts {field.element} values"
            require(self.offset(field.name) % field.element.width == 0, text)
        text = f"a row of {self.nbytes} bytes would cut values of {self.width} bytes in the row behind it"
        require(self.nbytes % self.width == 0, text)

    def __str__(self) -> str:
        """ "448 fp8_e4m3 content, 64 bf16 rope", with the padding where there is some."""
        parts = [f"{field.count} {field.element} {field.name}" for field in self.fields]
        return ", ".join(parts + [f"{self.nbytes - self.used} pad"] * (self.nbytes > self.used))


@dataclass(frozen=True)
class Scales:
    """One scale for every ``tile`` values (fewer in the last tile), rows padded to ``multiple`` bytes."""

    element: Element
    tile: int
    multiple: int = 1

    def __post_init__(self) -> None:
        """Refuse a tile without values."""
        require(self.tile > 0, f"a tile of {self.tile} values has no scale; it must be positive")


@dataclass(frozen=True)
class Vector:
    """A vector as it is stored: its values, and what scales them."""

    element: Element
    scales: Scales | None = None

    def scale_row(self, count: int) -> Row | None:
        """The scales of a vector of ``count`` values; None where it needs none."""
        if self.scales is None or count == 0:
            return None
        return Row((Field("scales", self.scales.element, -(-count // self.scales.tile)),), self.scales.multiple)


@dataclass(frozen=True)
class Precision:
    """The precision of every part of a block, and the bytes that its regions are aligned to."""

    name: str
    content: Vector  # the channels of a latent without RoPE
    rope: Element  # its RoPE channels, the last ones
    index_key: Vector
    alignment: int = 16  # what a TMA copy and the widest vector load of a GPU ask of an address

    @property
    def paged(self) -> bool:
        """Whether it is a record that SGLang's kernels page; the plain precisions are this engine's own."""
        return self.content.scales is not None


# Scale tiles as in SGLang's V4 layout: a power of two for 64 values of content; one fp32 for 128 values of an FP8
# indexer key; a power of two for 32 values of an FP4 one (the block of the OCP microscaling formats). SGLang pads the 7
# scales of V4's content with one byte; as a rule for any width, a row of scales is whole 8-byte words.
_CONTENT = Vector(Element.FP8, Scales(Element.UE8M0, tile=64, multiple=8))
FP8 = Precision("fp8", _CONTENT, Element.BF16, Vector(Element.FP4, Scales(Element.UE8M0, tile=32)))
FP8_INDEX8 = Precision("fp8-index8", _CONTENT, Element.BF16, Vector(Element.FP8, Scales(Element.FP32, tile=128)))
BF16 = Precision("bf16", Vector(Element.BF16), Element.BF16, Vector(Element.BF16))
FP32 = Precision("fp32", Vector(Element.FP32), Element.FP32, Vector(Element.FP32))  # latents/segment.py
PRECISIONS = {precision.name: precision for precision in (FP8, FP8_INDEX8, BF16, FP32)}

NamedRow = tuple[RegionName, Row]


@dataclass(frozen=True)
class LatentShape:
    """Widths in elements: a latent whose last ``rope_dim`` channels are rotated, and an indexer key (0: none)."""

    latent_dim: int
    rope_dim: int
    index_dim: int = 0

    def __post_init__(self) -> None:
        """Refuse widths that cannot be."""
        require(self.latent_dim > 0, f"a latent of {self.latent_dim} channels; it must have some")
        text = f"{self.rope_dim} RoPE channels do not fit into a latent of {self.latent_dim}"
        require(0 <= self.rope_dim <= self.latent_dim, text)
        require(self.index_dim >= 0, f"an indexer key of {self.index_dim} channels")

    def latent_rows(self, precision: Precision) -> tuple[NamedRow, ...]:
        """The rows of one latent: its data, content before RoPE, and its scales."""
        content = self.latent_dim - self.rope_dim
        parts = [("content", precision.content.element, content), ("rope", precision.rope, self.rope_dim)]
        data = Row(tuple(Field(*part) for part in parts if part[2]))
        return _with_scales(RegionName.LATENTS, data, RegionName.SCALES, precision.content.scale_row(content))

    def index_rows(self, precision: Precision) -> tuple[NamedRow, ...]:
        """The rows of one indexer key, and none where there is no indexer."""
        if not self.index_dim:
            return ()
        data = Row((Field("key", precision.index_key.element, self.index_dim),))
        scales = precision.index_key.scale_row(self.index_dim)
        return _with_scales(RegionName.INDEX_KEYS, data, RegionName.INDEX_SCALES, scales)

    def raw_rows(self, *, overlaps: bool) -> tuple[NamedRow, ...]:
        """What the compressor keeps of one token until its group is whole: kv and gate, fp32 in every precision.

        Where groups overlap there are two series of each, one for the token's own group and one for the next; SGLang's
        rings have the same widths (``deepseek_v4_compress_state.py``: 2048 and 512 for CSA, 1024 for HCA).
        """
        series = 2 if overlaps else 1
        widths = {RegionName.RAW: self.latent_dim, RegionName.RAW_INDEX: self.index_dim}
        return tuple(
            (name, Row(tuple(Field(part, Element.FP32, series * width) for part in ("kv", "gate"))))
            for name, width in widths.items()
            if width
        )


def latent_shape(geometry: Geometry, *, indexed: bool) -> LatentShape:
    """The widths of a layer of DeepSeek-V4."""
    return LatentShape(geometry.head_dim, geometry.rope_dim, geometry.index_head_dim if indexed else 0)


def _with_scales(name: RegionName, data: Row, beside: RegionName, scales: Row | None) -> tuple[NamedRow, ...]:
    return ((name, data),) if scales is None else ((name, data), (beside, scales))
