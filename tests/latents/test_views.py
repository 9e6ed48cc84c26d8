"""Typed views of blocks: where layout.py says, and of nothing else."""

from __future__ import annotations

import pytest
import torch

from redknot.latents.formats import BF16, FP8, FP8_INDEX8, FP32, PRECISIONS, Precision, RegionName
from redknot.latents.layout import ModelLayout, model_layout
from redknot.latents.views import fields, layout_digest
from redknot.model.geometry import geometry_from_config
from redknot.model.published import published_config
from redknot.nano.parameters import GEOMETRY as NANO

FLASH = geometry_from_config(published_config("flash"))


def digest(layout: ModelLayout) -> bytes:
    return layout_digest([layer.entries for layer in layout.layers])


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS.keys())
def test_the_fields_of_all_layers_cover_a_block_once(precision: Precision) -> None:
    """Every byte that a field writes is its own, and the bytes of no field are padding."""
    layout = model_layout(NANO, precision)
    nbytes = int(layout.block.stored)
    pool = torch.zeros(3, nbytes, dtype=torch.uint8)
    used = 0
    for layer, start in zip(layout.layers, layout.offsets, strict=True):
        for view in fields(pool, layer.entries, start).values():
            assert view.shape[:2] == (3, layer.entries.tokens // layer.entries.ratio)
            raw = view[1].view(torch.uint8)
            assert int(raw.count_nonzero()) == 0  # nobody else's
            raw.fill_(255)
            used += raw.numel()
    assert pool[1].count_nonzero() == used
    assert pool[0].count_nonzero() == pool[2].count_nonzero() == 0
    assert used == sum(region.rows * region.row.used for layer in layout.layers for region in layer.entries.regions)


def test_values_lie_at_the_bytes_of_the_layout() -> None:
    layout = model_layout(FLASH, FP8)
    csa = next(layer for layer in layout.layers if layer.entries.regions and layer.overlaps)
    start = layout.offsets[layout.layers.index(csa)]
    pool = torch.zeros(2, int(layout.block.stored), dtype=torch.uint8)
    one = fields(pool, csa.entries, start)
    one[RegionName.LATENTS, "rope"][1, 5, 2] = 1.0
    one[RegionName.LATENTS, "content"][1, 5, 447] = 1.0
    one[RegionName.SCALES, "scales"][1, 31, 6] = 127
    latents, scales = csa.entries.regions[:2]
    row = start + latents.offset + 5 * 576
    assert pool[1, row + 448 + 4 : row + 448 + 6].tolist() == [0x80, 0x3F]  # bfloat16 1.0
    assert pool[1, row + 447] == 0x38  # float8_e4m3fn 1.0
    assert pool[1, start + scales.offset + 31 * 8 + 6] == 127
    assert int(pool.count_nonzero()) == 4  # the lower byte of 1.0 is zero
    assert one[RegionName.INDEX_KEYS, "key"].shape == (2, 32, 64)  # 128 FP4 values in 64 bytes


def test_a_view_of_one_block_is_that_of_the_pool() -> None:
    layout = model_layout(NANO, FP32)
    pool = torch.randint(0, 100, (4, int(layout.block.stored)), dtype=torch.uint8)
    for layer, start in zip(layout.layers, layout.offsets, strict=True):
        of_pool, of_row = fields(pool, layer.entries, start), fields(pool[2], layer.entries, start)
        for key, view in of_pool.items():
            assert torch.equal(view[2].view(torch.uint8), of_row[key].view(torch.uint8))
            assert view.data_ptr() == of_pool[key].data_ptr()


def test_layouts_that_differ_have_other_digests() -> None:
    layouts = [model_layout(geometry, p) for geometry in (FLASH, NANO) for p in (FP8, FP8_INDEX8, BF16, FP32)]
    layouts.append(model_layout(FLASH, FP8, tokens=256))
    assert len({digest(layout) for layout in layouts}) == len(layouts)
    assert digest(model_layout(FLASH, FP8)) == digest(layouts[0])
