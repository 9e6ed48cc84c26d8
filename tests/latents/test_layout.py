"""Bytes of latents: the published numbers, properties over random geometries, and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redknot.artifact.sections import section_specs
from redknot.errors import ConfigError
from redknot.latents.formats import (
    BF16,
    FP8,
    FP8_INDEX8,
    FP32,
    PRECISIONS,
    Element,
    Field,
    LatentShape,
    Precision,
    RegionName,
    Row,
    Scales,
    Vector,
    latent_shape,
)
from redknot.latents.layout import (
    SGLANG_PAGE_TOKENS,
    Block,
    LayerLayout,
    ModelLayout,
    Region,
    Size,
    block_tokens,
    expansion,
    model_layout,
    pack,
    total,
)
from redknot.latents.segment import Segment
from redknot.model.geometry import Geometry, LayerKind, geometry_from_config
from redknot.model.published import published_config
from redknot.nano.parameters import GEOMETRY as NANO
from tests.kit.memory import nan_memory

FLASH = geometry_from_config(published_config("flash"))
PRO = geometry_from_config(published_config("pro"))
SLIDING, CSA, HCA = LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA


def size(values: Any, stored: Any) -> Size:
    return Size(Fraction(values), Fraction(stored))


def kind_of(layout: ModelLayout, kind: LayerKind) -> LayerLayout:
    return next(found for found in layout.kinds if found.kind is kind)


def lengths(block: Block) -> dict[RegionName, tuple[int, int, int]]:
    return {region.name: (region.rows, region.row.nbytes, region.offset) for region in block.regions}


# Published numbers of V4, and SGLang's layout.


def test_the_record_of_v4() -> None:
    (name, data), (beside, scales) = latent_shape(FLASH, indexed=False).latent_rows(FP8)
    assert (name, beside) == (RegionName.LATENTS, RegionName.SCALES)
    assert [field.nbytes for field in data.fields] == [448, 128]
    assert (data.offset("content"), data.offset("rope"), data.nbytes) == (0, 448, 576)
    assert (scales.used, scales.nbytes) == (7, 8)
    assert str(data) == "448 fp8_e4m3 content, 64 bf16 rope"
    assert str(scales) == "7 ue8m0 scales, 1 pad"


@pytest.mark.parametrize(("precision", "key", "with_scales"), [(FP8, 64, 68), (FP8_INDEX8, 128, 132)])
def test_indexer_keys_of_v4(precision: Precision, key: int, with_scales: int) -> None:
    rows = [row.nbytes for _, row in latent_shape(FLASH, indexed=True).index_rows(precision)]
    assert (rows[0], sum(rows)) == (key, with_scales)
    assert latent_shape(FLASH, indexed=False).index_rows(precision) == ()


@pytest.mark.parametrize("geometry", [FLASH, PRO], ids=["flash", "pro"])
def test_bytes_per_token_and_layer(geometry: Geometry) -> None:
    layout = model_layout(geometry, FP8)
    assert layout.block_tokens == 128
    csa, hca = kind_of(layout, CSA), kind_of(layout, HCA)
    assert csa.entries.per_token.values == Fraction(576 + 64, 4) == 160
    assert hca.entries.per_token.values == Fraction(576, 128) == Fraction(9, 2)
    assert int(hca.entries.per_token.values) == 4  # whole
    assert {kind.window.per_token for kind in layout.kinds} == {size(576, 584)}
    assert (csa.entries.per_row, hca.entries.per_row) == (size(640, 652), size(576, 584))
    assert csa.entries.per_token.stored == Fraction(652, 4)
    assert hca.entries.nbytes == 592  # the record of 584, aligned to 16


def test_flash_totals() -> None:
    layout = model_layout(FLASH, FP8)
    assert [FLASH.kinds.count(kind.kind) for kind in layout.kinds] == [2, 21, 20]
    assert layout.entries_per_token == size(3450, Fraction(21 * 20864 + 20 * 592, 128))
    assert layout.block == size(441_600, 449_984)
    assert layout.window_per_token == size(43 * 576, 43 * 584)
    assert layout.entries_per_token.values + layout.window_per_token.values == 28_218
    assert layout.state(1000).window == size(3_170_304, 3_214_336)
    assert layout.offsets[:5] == (0, 0, 0, 20864, 21456)


def test_pro_totals() -> None:
    layout = model_layout(PRO, FP8)
    assert [PRO.kinds.count(kind.kind) for kind in layout.kinds] == [30, 31]
    assert layout.entries_per_token == size(Fraction(9879, 2), Fraction(30 * 20864 + 31 * 592, 128))
    assert layout.block == size(632_256, 644_272)
    assert layout.window_per_token == size(61 * 576, 61 * 584)
    assert layout.state(1000).window == size(4_497_408, 4_559_872)


def test_nano_totals() -> None:
    layout = model_layout(NANO, FP8)
    assert layout.block_tokens == 32
    assert layout.entries_per_token.values == 5 * Fraction(144 + 16, 4) + 5 * Fraction(144, 32)
    plain = model_layout(NANO, FP32)
    assert plain.entries_per_token == size(5 * 160 + 5 * 16, 5 * 160 + 5 * 16)
    assert plain.window_per_token == size(12 * 512, 12 * 512)


def test_regions_of_a_csa_block() -> None:
    assert lengths(kind_of(model_layout(FLASH, FP8), CSA).entries) == {
        RegionName.LATENTS: (32, 576, 0),
        RegionName.SCALES: (32, 8, 18_432),
        RegionName.INDEX_KEYS: (32, 64, 18_688),
        RegionName.INDEX_SCALES: (32, 4, 20_736),
    }
    assert lengths(kind_of(model_layout(FLASH, BF16), CSA).entries) == {
        RegionName.LATENTS: (32, 1024, 0),
        RegionName.INDEX_KEYS: (32, 256, 32_768),
    }


@pytest.mark.parametrize("geometry", [FLASH, PRO], ids=["flash", "pro"])
def test_sglang_pages(geometry: Geometry) -> None:
    pages = model_layout(geometry, FP8_INDEX8).pages()
    found = {kind: {store: page.nbytes for store, page in stores.items()} for kind, stores in pages.items()}
    assert found[CSA] == {"window": 149_760, "entries": 37_440, "index": 8_448}
    assert found[HCA] == {"window": 149_760, "entries": 1_728}
    assert found.get(SLIDING, {"window": 149_760}) == {"window": 149_760}
    assert model_layout(geometry, FP8).pages()[CSA]["index"].nbytes == 4_352
    # In the page: all data rows, then all scale rows, at the offsets of SGLang's kv_layout.
    assert lengths(pages[CSA]["window"])[RegionName.SCALES] == (256, 8, 147_456)
    assert lengths(pages[CSA]["entries"])[RegionName.SCALES] == (64, 8, 36_864)
    assert lengths(pages[HCA]["entries"])[RegionName.SCALES] == (2, 8, 1_152)
    assert lengths(pages[CSA]["index"])[RegionName.INDEX_SCALES] == (64, 4, 8_192)
    assert pages[CSA]["window"].multiple == 576


def test_pages_are_padded_records() -> None:
    for records, nbytes in ((256, 149_760), (64, 37_440), (2, 1_728)):
        assert nbytes == math.ceil(records * 584 / 576) * 576


def test_compressor_state_of_v4() -> None:
    """SGLang's rings: 8 rows of 2048 and 512 for CSA, 128 rows of 1024 for HCA, fp32."""
    layout = model_layout(FLASH, FP8)
    csa, hca, sliding = (kind_of(layout, kind) for kind in (CSA, HCA, SLIDING))
    assert lengths(csa.tail) == {RegionName.RAW: (8, 2048 * 4, 0), RegionName.RAW_INDEX: (8, 512 * 4, 65_536)}
    assert lengths(hca.tail) == {RegionName.RAW: (128, 1024 * 4, 0)}
    assert sliding.tail.nbytes == 0
    # What decoding needs after n tokens: the last n % 4 + 4 rows, and the open n % 128.
    assert [csa.tail_rows(tokens) for tokens in (1, 3, 4, 7, 1023)] == [1, 3, 4, 7, 7]
    assert [hca.tail_rows(tokens) for tokens in (1, 127, 128, 1023)] == [1, 127, 0, 127]
    assert sliding.tail_rows(1023) == 0
    assert layout.arena.tail == size(12_206_080, 12_206_080)
    assert layout.checkpoint == layout.state(1024)
    assert layout.checkpoint.tail == size(21 * 4 * 10_240, 21 * 4 * 10_240)


def test_v3_expansion() -> None:
    """DeepSeek-V3: 128 heads, kv_lora_rank 512, qk_rope_head_dim 64, qk_nope_head_dim 128, v_head_dim 128."""
    plain, with_rope = expansion(128, 128, 128, 512 + 64), expansion(128, 128, 128, 512 + 64, key_rope_dim=64)
    assert (plain, with_rope) == (Fraction(512, 9), Fraction(640, 9))
    assert (f"{float(plain):.1f}", f"{float(with_rope):.1f}") == ("56.9", "71.1")


def test_v3_blocks() -> None:
    """An entry a token, pages of 64."""
    assert block_tokens([1], page_tokens=64) == 64
    block = pack(64, 1, LatentShape(512 + 64, 64).latent_rows(BF16), BF16.alignment)
    assert block.per_token == size(1152, 1152)
    assert block.nbytes == 64 * 1152


def test_v4_blocks() -> None:
    assert block_tokens([0, 4, 128]) == 128
    assert block_tokens([0, 4, 128], page_tokens=SGLANG_PAGE_TOKENS) == 256
    assert block_tokens([]) == block_tokens([0]) == 1
    assert model_layout(FLASH, FP8, 256).block.values == 2 * model_layout(FLASH, FP8).block.values


# Properties over random geometries.


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Any widths whose FP4 keys are whole bytes and whose scales have an address, and any ratios."""
    rope = 2 * draw(st.integers(1, 40))
    csa, hca = draw(st.lists(st.integers(1, 48), min_size=2, max_size=2, unique=True))
    kinds = draw(st.lists(st.sampled_from(list(LayerKind)), min_size=1, max_size=9))
    return replace(
        FLASH,
        head_dim=rope + 2 * draw(st.integers(0, 300)),
        rope_dim=rope,
        index_head_dim=4 * draw(st.integers(rope // 4 + 1, 80)),
        csa_ratio=csa,
        hca_ratio=hca,
        window=draw(st.integers(1, 300)),
        kinds=tuple(kinds),
        hash_layers=(False,) * len(kinds),
    )


precisions = st.sampled_from(list(PRECISIONS.values()))
SCALES = {RegionName.SCALES, RegionName.INDEX_SCALES}


def naive_row(geometry: Geometry, precision: Precision, *, indexed: bool) -> tuple[int, int]:
    """Bytes of one entry's values, and of its values and scales, from the precision's name alone."""
    content, key = geometry.head_dim - geometry.rope_dim, geometry.index_head_dim if indexed else 0
    if precision in (FP32, BF16):
        nbytes = (geometry.head_dim + key) * (4 if precision is FP32 else 2)
        return nbytes, nbytes
    values = content + 2 * geometry.rope_dim + (key // 2 if precision is FP8 else key)
    key_scales = math.ceil(key / 32) if precision is FP8 else 4 * math.ceil(key / 128)
    return values, values + 8 * math.ceil(math.ceil(content / 64) / 8) + key_scales


@given(geometries(), precisions)
def test_blocks_of_any_geometry(geometry: Geometry, precision: Precision) -> None:
    layout = model_layout(geometry, precision)
    values = stored = 0
    for layer, found in enumerate(layout.layers):
        ratio = geometry.ratio(layer)
        assert (found.kind, found.ratio) == (geometry.kinds[layer], ratio)
        assert layout.offsets[layer] == stored
        assert layout.offsets[layer] % precision.alignment == 0
        block = found.entries
        if not ratio:
            assert (block.regions, block.nbytes) == ((), 0)
            continue
        assert layout.block_tokens % ratio == 0  # no block ends inside a group
        one, with_scales = naive_row(geometry, precision, indexed=found.kind is CSA)
        entries = layout.block_tokens // ratio
        assert block.size.values == entries * one
        assert block.per_row == size(one, with_scales)
        assert 0 <= block.nbytes - entries * with_scales < len(block.regions) * precision.alignment
        values, stored = values + entries * one, stored + block.nbytes
    assert layout.block == size(values, stored)
    assert layout.entries_per_token * layout.block_tokens == layout.block
    one, with_scales = naive_row(geometry, precision, indexed=False)
    assert layout.window_per_token.values == one * geometry.num_layers
    assert layout.window_per_token.stored >= with_scales * geometry.num_layers


@given(geometries(), precisions)
def test_regions_tile_their_block(geometry: Geometry, precision: Precision) -> None:
    layout = model_layout(geometry, precision)
    blocks = [block for kind in layout.kinds for block in (kind.entries, kind.window, kind.last_window, kind.tail)]
    if precision.paged:
        blocks += [page for stores in layout.pages(2 * layout.block_tokens).values() for page in stores.values()]
    for block in blocks:
        end = 0
        for region in block.regions:
            assert 0 <= region.offset - end < block.alignment
            assert region.offset % block.alignment == 0
            assert region.end - region.offset == region.rows * region.row.nbytes
            assert region.rows * block.ratio == block.tokens
            assert sum(field.nbytes for field in region.row.fields) == region.row.used
            assert 0 <= region.row.nbytes - region.row.used < region.row.multiple
            end = region.end
        assert 0 <= block.nbytes - end < block.multiple
        assert block.per_token * block.tokens == block.size
        assert block.size.values == sum(r.length for r in block.regions if r.name not in SCALES)
        assert block.size.values <= block.size.stored == block.nbytes


@given(geometries(), precisions, st.integers(1, 3000))
def test_documents_of_any_geometry(geometry: Geometry, precision: Precision, tokens: int) -> None:
    layout = model_layout(geometry, precision)
    entries, state = layout.entries(tokens), layout.state(tokens)
    assert entries.stored == math.ceil(tokens / layout.block_tokens) * layout.block.stored
    assert entries.values <= entries.stored
    assert entries.values >= layout.entries_per_token.values * tokens
    whole = tokens * layout.block_tokens
    assert layout.entries(whole).values == layout.entries_per_token.values * whole
    # State never outgrows the room that a request has for it, and does at worst fill it.
    assert state.window.stored <= layout.arena.window.stored
    assert state.tail.stored <= layout.arena.tail.stored
    assert layout.state(geometry.window).window.values == layout.arena.window.values
    assert layout.checkpoint.tail == layout.state(whole).tail
    raw = 0
    for layer in range(geometry.num_layers):
        ratio, indexed = geometry.ratio(layer), geometry.kinds[layer] is CSA
        rows = tokens % ratio if ratio else 0
        width = 2 * geometry.head_dim
        if indexed:
            rows += ratio if tokens >= ratio else 0
            width = 4 * (geometry.head_dim + geometry.index_head_dim)
        raw += 4 * rows * width
    assert state.tail == size(raw, raw)


@given(geometries(), st.integers(1, 400))
def test_fp32_is_what_artifacts_hold(geometry: Geometry, tokens: int) -> None:
    layout = model_layout(geometry, FP32)

    def stored(needs: tuple[str, ...]) -> int:
        return sum(4 * math.prod(shape) for _, shape in section_specs(geometry, tokens, needs).values())

    entries = layout.entries(tokens).values
    assert stored(("latents",)) == entries + layout.state(tokens).window.values
    assert stored(("latents", "window_all")) == entries + layout.window_per_token.values * tokens


@pytest.mark.parametrize("capacity", [32, 96])
def test_fp32_is_what_segments_hold(capacity: int) -> None:
    segment, layout = Segment(0, 0, 0, closed=False), model_layout(NANO, FP32)
    memory = nan_memory(NANO)
    memory.allocate(segment, capacity)
    assert segment.blocks is not None
    for latents, found in zip(segment.layers, layout.layers, strict=True):
        entries = sum(len(paged) * paged.pool.row_bytes for paged in (latents.entries, latents.index_keys) if paged)
        assert found.entries.per_token == size(Fraction(entries, capacity), Fraction(entries, capacity))
        assert found.window.per_token.stored == Fraction(latents.window.nbytes, capacity)
    # A block of the store is the blocks of all layers and nothing else.
    assert len(segment.blocks.handles) * layout.block.stored == sum(h.length for h in segment.blocks.handles)


def test_a_total_of_nothing() -> None:
    assert total([]) == size(0, 0)
    only_sliding = replace(FLASH, kinds=(SLIDING,) * 2, hash_layers=(False,) * 2)
    layout = model_layout(only_sliding, FP8)
    assert (layout.block, layout.entries(100), layout.offsets) == (size(0, 0), size(0, 0), (0, 0))


# What is refused, and how it is said.


def csa_rows() -> tuple[tuple[RegionName, Row], ...]:
    shape = latent_shape(FLASH, indexed=True)
    return shape.latent_rows(FP8_INDEX8) + shape.index_rows(FP8_INDEX8)


DATA = Row((Field("content", Element.FP8, 10),))
REGION = Region(RegionName.LATENTS, DATA, 4, 0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: model_layout(FLASH, FP8, 130), "130 tokens would split a group of 4"),
        (lambda: model_layout(FLASH, FP8, 64), "64 tokens would split a group of 128"),
        (lambda: model_layout(FLASH, FP8, 0), "tokens is 0; it must be positive"),
        (lambda: model_layout(FLASH, FP8, -128), "tokens is -128"),
        (lambda: model_layout(FLASH, FP8).pages(192), "a page of 192 tokens would split a block of 128"),
        (lambda: model_layout(FLASH, FP8).pages(0), "a page of 0 tokens"),
        (lambda: pack(6, 4, csa_rows()), "6 tokens would split a group of 4"),
        (lambda: pack(8, 0, csa_rows()), "ratio 0 must be positive"),
        (lambda: pack(8, 4, csa_rows(), alignment=0), "alignment 0 and ratio 4 must be positive"),
        (lambda: pack(8, 4, csa_rows(), multiple=0), "multiple is 0"),
        (lambda: pack(8, 4, csa_rows(), 9, 8), "an alignment of 9 bytes cuts the 4-byte values of index_scales"),
        (
            lambda: pack(8, 4, csa_rows(), 1, 11),
            "blocks of 1441 bytes cut the 2-byte values of latents in the one behind",
        ),
        (lambda: Block(16, 4, (REGION, REGION), 1, 1), "starts at byte 0 and cuts the region that ends at byte 40"),
        (lambda: Block(16, 4, (REGION, replace(REGION, offset=41)), 1, 1), "not at the next multiple of 1"),
        (lambda: Block(16, 4, (replace(REGION, offset=-16),), 16, 16), "starts at byte -16"),
        (lambda: Block(16, 4, (replace(REGION, rows=3),), 16, 16), "latents has 3 rows for 16 tokens of 4 a row"),
        (lambda: LatentShape(64, 128), "128 RoPE channels do not fit into a latent of 64"),
        (lambda: LatentShape(64, -2), "-2 RoPE channels"),
        (lambda: LatentShape(0, 0), "a latent of 0 channels"),
        (lambda: LatentShape(64, 16, -1), "an indexer key of -1 channels"),
        (lambda: LatentShape(64, 17).latent_rows(FP8), "rope starts at byte 47, which cuts bf16 values"),
        (lambda: LatentShape(64, 16, 33).index_rows(FP8), "33 fp4_e2m1 values ends inside a byte"),
        (lambda: Field("content", Element.FP8, 0), "content has 0 values"),
        (lambda: Row(()), "a row needs fields"),
        (lambda: Row((Field("content", Element.FP8, 4),), 0), "padding to a positive multiple"),
        (
            lambda: Row((Field("a", Element.FP32, 1), Field("b", Element.FP8, 1))),
            "a row of 5 bytes would cut values of 4",
        ),
        (lambda: Scales(Element.UE8M0, 0), "a tile of 0 values"),
    ],
)
def test_what_would_be_cut_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make()
    assert str(caught.value).startswith("layout: ")
    assert "\n" not in str(caught.value)


def test_a_precision_of_ones_own() -> None:
    """A precision is data: content in BF16 with a scale for 32 values, aligned to 64 bytes."""
    own = Precision("own", Vector(Element.BF16, Scales(Element.FP32, 32)), Element.FP32, Vector(Element.FP8), 64)
    block = kind_of(model_layout(NANO, own), CSA).entries
    assert lengths(block) == {
        RegionName.LATENTS: (8, 112 * 2 + 16 * 4, 0),
        RegionName.SCALES: (8, 4 * 4, 2304),
        RegionName.INDEX_KEYS: (8, 32, 2432),
    }
    assert block.nbytes == 2688


def test_layout_needs_no_torch() -> None:
    code = "import sys, redknot.latents.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
