"""Typed views of bytes that ``layout.py`` laid out: the numbers of a region, of one block or of a whole pool."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from redknot.errors import ConfigError
from redknot.latents.formats import Element, Field, RegionName
from redknot.latents.layout import Block, Region

# Numbers that torch has no type for stay bytes: two FP4 values in each, or the exponent that a UE8M0 scale is.
_DTYPES = {
    Element.FP32: torch.float32,
    Element.BF16: torch.bfloat16,
    Element.FP8: torch.float8_e4m3fn,
    Element.FP4: torch.uint8,
    Element.UE8M0: torch.uint8,
}


def layout_digest(blocks: Sequence[Block]) -> bytes:
    """What identifies a layout: the regions of every layer's block, one behind the other. 32 bytes."""
    return hashlib.blake2b(repr(tuple(blocks)).encode(), digest_size=32, person=b"redknot-layout").digest()


def fields(data: Tensor, block: Block, start: int = 0) -> dict[tuple[RegionName, str], Tensor]:
    """The fields of every region of ``block``, which begins ``start`` bytes into the last dimension of ``data``.

    ``data`` is uint8, [nbytes] for one block or [capacity, nbytes] for a pool; a field is [..., rows, numbers]. Nothing
    is copied.
    """
    return {
        (region.name, field.name): _view(data, region, field, start)
        for region in block.regions
        for field in region.row.fields
    }


def row_view(pool: Tensor, region: Region, start: int) -> Tensor:
    """Rows of a region over a whole pool, [N, numbers]; ``start`` is where its block begins in the bytes of a slot.

    ``pool`` is uint8 [capacity, nbytes]. Rows lie a row apart, so that row r of the slot that begins at byte b of the
    pool is row b / row.nbytes + r; most rows between belong to other regions. ConfigError where a row holds several
    kinds of numbers, or where slots are not whole rows.
    """
    elements = {field.element for field in region.row.fields}
    if len(elements) != 1 or region.row.nbytes != region.row.used:
        raise ConfigError(f"layout: rows of {region.name} ({region.row}) are no vectors of one kind of number")
    if pool.shape[1] % region.row.nbytes:
        raise ConfigError(f"layout: slots of {pool.shape[1]} bytes are not whole rows of {region.row.nbytes}")
    dtype = _DTYPES[elements.pop()]
    width = region.row.nbytes // dtype.itemsize
    first = start + region.offset
    count = (pool.numel() - first) // region.row.nbytes
    return pool.view(dtype).as_strided((count, width), (width, 1), first // dtype.itemsize)


def _view(data: Tensor, region: Region, field: Field, start: int) -> Tensor:
    dtype = _DTYPES[field.element]
    first = data.storage_offset() + start + region.offset + region.row.offset(field.name)
    width = dtype.itemsize
    leading = data.dim() - 1
    return data.view(dtype).as_strided(
        (*data.shape[:leading], region.rows, field.nbytes // width),
        (*(stride // width for stride in data.stride()[:leading]), region.row.nbytes // width, 1),
        first // width,
    )
