"""Packed rows of latents and indexer keys, in pages of bytes: the torch reference of packing and unpacking.

A row is quantised channels first and bf16 channels (RoPE) behind them; its scales lie apart. The formats are those
that SGLang 0.5.23 reads (``dsv4/kv_layout.py``, ``test/kernels/deepseek_v4``): a record of V4 is 448 e4m3 values, 64
bf16 and 7 powers of two (with a pad byte: 584 bytes), an indexer key 128 e4m3 values and one fp32 scale (132 bytes), or
128 e2m1 values and 4 powers of two (68 bytes). A row number is page * rows of a page + place in the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from redknot.errors import ConfigError
from redknot.model.quant import MXFP4_GROUP, dequantise_mxfp4, scale_values

SMALLEST = 1e-4  # what SGLang keeps the largest magnitude of a tile (of fp4: its scale) above
MOST = {"fp8": 448.0, "fp4": 6.0}
FP4_CUTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between the magnitudes of e2m1; a tie goes down, as in SGLang


class Quantised(StrEnum):
    """How the quantised channels of a row are stored."""

    FP8 = "fp8"  # e4m3, a byte a value
    FP4 = "fp4"  # e2m1, two values a byte, the even one in the low nibble


@dataclass(frozen=True)
class RowFormat:
    """What a row holds: ``values`` quantised channels with a scale for every ``tile``, then ``rope`` bf16 ones."""

    element: Quantised
    values: int
    tile: int
    fp32_scales: bool  # else ue8m0: the exponent + 127 in a byte
    rope: int = 0

    @property
    def width(self) -> int:
        """Channels of a row."""
        return self.values + self.rope

    @property
    def quantised_bytes(self) -> int:
        """Bytes before the bf16 channels."""
        return self.values // 2 if self.element is Quantised.FP4 else self.values

    @property
    def data_bytes(self) -> int:
        """Bytes of a row without its scales."""
        return self.quantised_bytes + 2 * self.rope

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales, without padding."""
        return self.values // self.tile * (4 if self.fp32_scales else 1)

    def __post_init__(self) -> None:
        """Refuse what no kernel reads."""
        power = self.tile >= 16 and self.tile & (self.tile - 1) == 0
        if not power or self.values <= 0 or self.values % self.tile:
            raise ConfigError(
                f"records: {self.values} values in tiles of {self.tile} are not whole powers of two >= 16"
            )
        if self.element is Quantised.FP4 and (self.tile != MXFP4_GROUP or self.fp32_scales):
            raise ConfigError(f"records: fp4 values have a ue8m0 scale for each {MXFP4_GROUP}")
        if self.rope < 0 or self.rope % 2:
            raise ConfigError(f"records: {self.rope} RoPE channels are not pairs")


V4_RECORD = RowFormat(Quantised.FP8, values=448, tile=64, fp32_scales=False, rope=64)
V4_INDEX_FP8 = RowFormat(Quantised.FP8, values=128, tile=128, fp32_scales=True)
V4_INDEX_FP4 = RowFormat(Quantised.FP4, values=128, tile=32, fp32_scales=False)


@dataclass(frozen=True)
class Records:
    """Rows of one format in ``pages``: uint8 [P, page bytes], bytes of a page contiguous, pages at any even stride.

    Row i of a page has its data at ``data_offset + i * data_stride`` and its scales at ``scale_offset + i *
    scale_stride``; ConfigError where a number would be cut by its address or lie outside the page.
    """

    pages: Tensor
    format: RowFormat
    rows: int
    data_offset: int
    data_stride: int
    scale_offset: int
    scale_stride: int

    @property
    def capacity(self) -> int:
        """Rows of all pages."""
        return self.pages.shape[0] * self.rows

    @property
    def data(self) -> Tensor:
        """Quantised channels, uint8 [P, rows, bytes] (a view)."""
        return self._view(torch.uint8, self.data_offset, self.data_stride, self.format.quantised_bytes)

    @property
    def rope(self) -> Tensor:
        """The bf16 channels [P, rows, rope] (a view)."""
        return self._view(
            torch.bfloat16, self.data_offset + self.format.quantised_bytes, self.data_stride, 2 * self.format.rope
        )

    @property
    def scales(self) -> Tensor:
        """Scales, float32 or uint8 exponents [P, rows, values / tile] (a view)."""
        dtype = torch.float32 if self.format.fp32_scales else torch.uint8
        return self._view(dtype, self.scale_offset, self.scale_stride, self.format.scale_bytes)

    def _view(self, dtype: torch.dtype, offset: int, stride: int, nbytes: int) -> Tensor:
        typed, size = self.pages.view(dtype), dtype.itemsize
        shape = (len(typed), self.rows, nbytes // size)
        strides = (typed.stride(0), stride // size, 1)
        return typed.as_strided(shape, strides, typed.storage_offset() + offset // size)

    def __post_init__(self) -> None:
        """Refuse pages that do not hold their rows."""
        pages = self.pages
        if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.stride(1) != 1 or self.rows < 1:
            raise ConfigError(
                "records: pages are uint8 [P, page bytes] with contiguous bytes and at least one row each"
            )
        for what, offset, stride, nbytes in (
            ("data", self.data_offset, self.data_stride, self.format.data_bytes),
            ("scales", self.scale_offset, self.scale_stride, self.format.scale_bytes),
        ):
            if offset < 0 or stride < nbytes or offset + (self.rows - 1) * stride + nbytes > pages.shape[1]:
                raise ConfigError(
                    f"records: {self.rows} rows of {what} do not fit into pages of {pages.shape[1]} bytes"
                )
        for size, needed, parts in (
            (2, self.format.rope > 0, (self.data_offset + self.format.quantised_bytes, self.data_stride)),
            (4, self.format.fp32_scales, (self.scale_offset, self.scale_stride)),
        ):
            addresses = (*parts, pages.stride(0), pages.shape[1], pages.storage_offset())
            if needed and any(address % size for address in addresses):
                raise ConfigError(f"records: {size}-byte numbers of a page would be cut by their address")


def split_pages(pages: Tensor, row_format: RowFormat, rows: int, scale_stride: int | None = None) -> Records:
    """SGLang's pages: all data rows, then all scale rows (of whole 8-byte words beside RoPE channels)."""
    stride = scale_stride or (-(-row_format.scale_bytes // 8) * 8 if row_format.rope else row_format.scale_bytes)
    return Records(pages, row_format, rows, 0, row_format.data_bytes, rows * row_format.data_bytes, stride)


def unpack(records: Records, rows: Tensor) -> Tensor:
    """Rows by number [n] as float32 [n, width]; a number that is negative or past the pages gives zeros."""
    seen = (rows >= 0) & (rows < records.capacity)
    found = torch.zeros(len(rows), records.format.width, device=rows.device)
    at = rows[seen]
    page, slot = at // records.rows, at % records.rows
    scales = scale_values(records.scales[page, slot])
    data = records.data[page, slot]
    if records.format.element is Quantised.FP4:
        values = dequantise_mxfp4(data, scales)
    else:
        values = data.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(records.format.tile, 1)
    found[seen] = torch.cat((values, records.rope[page, slot].float()), 1) if records.format.rope else values
    return found


def pack_(records: Records, rows: Tensor, values: Tensor) -> None:
    """Quantise ``values`` [n, width], finite, into rows by number [n], each once; numbers outside are skipped."""
    seen, layout = (rows >= 0) & (rows < records.capacity), records.format
    at, kept = rows[seen], values[seen].float()
    page, slot = at // records.rows, at % records.rows
    tiles = kept[:, : layout.values].unflatten(1, (-1, layout.tile))
    scales = _scales(tiles.abs().amax(-1), layout)
    scaled = (tiles / scale_values(scales).unsqueeze(-1)).flatten(1)
    records.scales[page, slot] = scales
    if layout.element is Quantised.FP4:
        records.data[page, slot] = _e2m1(scaled)
    else:
        most = MOST["fp8"]
        records.data[page, slot] = scaled.clamp(-most, most).to(torch.float8_e4m3fn).view(torch.uint8)
    if layout.rope:
        records.rope[page, slot] = kept[:, layout.values :].to(torch.bfloat16)


def _scales(largest: Tensor, layout: RowFormat) -> Tensor:
    """Scales of tiles from their largest magnitudes: float32, or the exponent of the next power of two."""
    if layout.element is Quantised.FP4:
        scales = (largest / MOST["fp4"]).clamp_min(SMALLEST)
    else:
        scales = largest.clamp_min(SMALLEST) / MOST["fp8"]
    if layout.fp32_scales:
        return scales
    bits = scales.view(torch.int32)
    return ((bits >> 23) + (bits & 0x7FFFFF != 0)).to(torch.uint8)


def _e2m1(scaled: Tensor) -> Tensor:
    """[n, values] in units of their scale to bytes [n, values / 2]; zero has no sign."""
    code = torch.bucketize(scaled.abs(), torch.tensor(FP4_CUTS, device=scaled.device)).to(torch.uint8)
    code |= ((scaled < 0) & (code > 0)).to(torch.uint8) << 3
    return code[:, 0::2] | code[:, 1::2] << 4
