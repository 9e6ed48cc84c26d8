"""Native pages: reused latents get into them turned and transformed as SGLang does, counted, or not at all."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redknot.errors import ConfigError
from redknot.model.geometry import LayerKind, geometry_from_config
from redknot.model.published import published_config
from redknot.ops.hadamard import hadamard
from redknot.ops.records import V4_INDEX_FP4, V4_INDEX_FP8, V4_RECORD, pack_, split_pages, unpack
from redknot.ops.relocate import Stored
from redknot.ops.rope import inverse_frequencies, rotate, rotation_at
from redknot.serving.native import native_counters
from sglang_patches.cuda import contract
from sglang_patches.cuda.pools import Held, NativePools
from sglang_patches.cuda.source import package_folder

if package_folder("sglang") is None:
    pytest.skip("sglang is in an environment of its own", allow_module_level=True)

from tests.kit import sglangtext

GEOMETRY = geometry_from_config(published_config("flash"))
SLIDING, CSA, HCA = (GEOMETRY.kinds.index(kind) for kind in (LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA))
PAGES = 4  # of 256 tokens; page 0 is nobody's
POISON = 0xA5


class Pool:
    """SGLang's pool of the full model as far as pages go, one layer of each kind; window slots are those of tokens."""

    def __init__(self, *, fp4: bool = False, **changes: Any) -> None:
        self.kv_layout = SimpleNamespace(value="v4")
        self.request_window, self._unified_kv, self.uniform_fp8 = None, False, False
        self.compression_ratios = [GEOMETRY.ratio(layer) for layer in range(GEOMETRY.num_layers)] + [4]
        self.shift = 0
        self.sizes = {"window": (256, 149_760), "csa": (64, 37_440), "hca": (2, 1_728)}
        self.sizes["index"] = (64, 4_352 if fp4 else 8_448)
        for name, value in changes.items():
            setattr(self, name, value)
        self.pages = {
            name: torch.full((PAGES, nbytes), POISON, dtype=torch.uint8) for name, (_, nbytes) in self.sizes.items()
        }

    def get_swa_raw_buffer(self, layer_id: int) -> Tensor:
        return self.pages["window"]

    def get_swa_key_page_size(self) -> int:
        return self.sizes["window"][0]

    def translate_loc_from_full_to_swa(self, kv_indices: Tensor) -> Tensor:
        return torch.where(kv_indices < self.shift, 0, kv_indices)

    def _kind(self, layer_id: int) -> str:
        return "csa" if GEOMETRY.kinds[layer_id] is LayerKind.CSA else "hca"

    def get_extra_key_buffer(self, layer_id: int) -> Tensor:
        return self.pages[self._kind(layer_id)]

    def get_extra_key_page_size(self, layer_id: int) -> int:
        return self.sizes[self._kind(layer_id)][0]

    def get_index_k_with_scale_buffer(self, layer_id: int) -> Tensor:
        return self.pages["index"]

    def get_index_k_page_size(self, compress_ratio: int = 4) -> int:
        return self.sizes["index"][0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return sglangtext.load(contract.installed(), tmp_path_factory.mktemp("reference"))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# SGLang's references.


def test_the_transform_is_sglangs(reference):
    matrix = reference._walsh_hadamard_matrix(128, torch.float32, "cpu").float()
    keys = random(5, 128)
    wanted = keys @ matrix  # its entries are rounded to bf16
    assert torch.allclose(hadamard(keys), wanted, atol=0.02)
    assert torch.equal(hadamard(torch.eye(128)) > 0, matrix > 0)


# Filling.


def packed(row_format: Any, values: Tensor) -> tuple[Stored, Tensor]:
    """Rows in pages of their own, in an order of their own."""
    nbytes = 8 * (row_format.data_bytes + 8)
    pages = -(-len(values) // 8)
    records = split_pages(torch.full((pages, nbytes), POISON, dtype=torch.uint8), row_format, 8)
    rows = torch.randperm(8 * pages, generator=torch.Generator().manual_seed(3))[: len(values)]
    pack_(records, rows, values)
    return Stored(records), rows


def held_segment(start: int, first: int, tokens: int, layer: int, seed: int = 0, fp4: bool = False) -> Held:
    kind, ratio = GEOMETRY.kinds[layer], GEOMETRY.ratio(layer)
    made = {"window": packed(V4_RECORD, random(tokens, 512, seed=seed))}
    if ratio:
        made["entries"] = packed(V4_RECORD, random(tokens // ratio, 512, seed=seed + 1))
    if kind is LayerKind.CSA:
        index = V4_INDEX_FP4 if fp4 else V4_INDEX_FP8
        made["index"] = packed(index, random(tokens // ratio, 128, seed=seed + 2))
    parts = ({name: pair[number] for name, pair in made.items()} for number in (0, 1))
    return Held(start, first, first + tokens, *parts)


def slots_of(pages: list[int], tokens: int) -> Tensor:
    return torch.cat([torch.arange(256 * page, 256 * page + 256) for page in pages])[:tokens]


def within(found: Tensor, wanted: Tensor, row_format: Any) -> bool:
    """One rounding apart: half a step of the element at the largest value of the row."""
    share = {V4_RECORD: 2**-4, V4_INDEX_FP8: 2**-4, V4_INDEX_FP4: 0.4}[row_format]
    return bool(((found - wanted).abs() <= share * wanted.abs().amax(-1, keepdim=True)).all())


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("layer", [SLIDING, CSA, HCA])
@given(first=st.sampled_from([0, 128, 256]), start=st.sampled_from([0, 128, 3 * 128, 2**19]))
@settings(max_examples=6, deadline=None)
def test_a_segment_lies_in_native_pages_turned_to_its_place(layer, first, start, fp4):
    """What SGLang would read there is the key that was stored, turned by the distance; nothing else is touched."""
    pool, counters = Pool(fp4=fp4), native_counters()
    pools, tokens = NativePools(pool, GEOMETRY, counters), first + 256
    slots = slots_of([3, 1, 2], tokens)
    head = [Held(0, 0, first, {})] if first else []
    segment = held_segment(start, first, 256, layer, fp4=fp4)
    pools.fill(layer, [*head, segment], slots)
    turn = rotation_at(torch.tensor([first - start]), inverse_frequencies(GEOMETRY.rope(layer), GEOMETRY.rope_dim))
    ratio, written = GEOMETRY.ratio(layer), 0
    for store in segment.rows:
        target = pools.records(store, layer)
        stored = segment.stored[store]
        before = unpack(stored.records, segment.rows[store])
        places = slots[first:tokens] if store == "window" else slots[first:tokens:ratio] // ratio
        found = unpack(target.records, places)
        found = hadamard(found) if target.transformed else found
        wanted = rotate(before, type(turn)(turn.cos.expand(len(before), -1), turn.sin.expand(len(before), -1)))
        assert within(found, wanted, target.records.format)
        written += len(places)
        others = torch.ones(target.records.capacity, dtype=torch.bool)
        others[places] = False
        page, row = others.nonzero()[:, 0] // target.records.rows, others.nonzero()[:, 0] % target.records.rows
        assert bool((target.records.data[page, row] == POISON).all())
    moved = first != start
    untouched = 0 if moved else sum(len(segment.rows[store]) for store in segment.rows if store != "index")
    assert counters["rewrites"] == written - untouched
    assert counters["rewrites_refused"] == 0


def test_latents_that_stay_at_their_place_keep_their_bytes():
    pool, counters = Pool(), native_counters()
    pools, segment = NativePools(pool, GEOMETRY, counters), held_segment(0, 0, 256, HCA)
    slots = slots_of([2], 256)
    pools.fill(HCA, [segment], slots)
    for store, places in (("window", slots), ("entries", slots[::128] // 128)):
        target, stored, rows = pools.records(store, HCA), segment.stored[store], segment.rows[store]
        page, row = rows // stored.records.rows, rows % stored.records.rows
        to, slot = places // target.records.rows, places % target.records.rows
        assert torch.equal(target.records.data[to, slot], stored.records.data[page, row])
        assert torch.equal(target.records.scales[to, slot], stored.records.scales[page, row])
        assert torch.equal(target.records.rope[to, slot], stored.records.rope[page, row])
    assert counters["rewrites"] == 0


def test_a_key_that_is_turned_there_and_back_is_the_same_within_two_roundings():
    pool, counters = Pool(), native_counters()
    pools, segment = NativePools(pool, GEOMETRY, counters), held_segment(384, 128, 128, CSA)
    pools.fill(CSA, [Held(0, 0, 128, {}), segment], slots_of([1], 256))
    native = pools.records("index", CSA)
    back = Held(128, 384, 512, {"index": native}, {"index": torch.arange(64 + 32, 64 + 64)})
    again = slots_of([3, 2], 512)
    pools.fill(CSA, [Held(0, 0, 384, {}), back], again)
    found = hadamard(unpack(native.records, again[384:512:4] // 4))
    wanted = unpack(segment.stored["index"].records, segment.rows["index"])
    assert bool(((found - wanted).abs() <= 0.13 * wanted.abs().amax(-1, keepdim=True)).all())


def test_window_rows_that_sglang_gave_up_are_not_written():
    pool, counters = Pool(shift=256 + 200), native_counters()
    pools = NativePools(pool, GEOMETRY, counters)
    pools.fill(SLIDING, [held_segment(128, 0, 256, SLIDING)], slots_of([1], 256))
    assert bool((pool.pages["window"][0] == POISON).all())
    assert counters["rewrites"] == 56


@pytest.mark.parametrize(
    ("segments", "said"),
    [
        ([(0, 0, 100), (0, 100, 128)], "segment 0 at tokens 0 to 100 does not end on the grid of 128 tokens"),
        ([(64, 0, 128)], "segment 0 at tokens 0 to 128 of a frame's token 64 on does not start on the grid"),
        ([(0, 128, 128)], "does not follow what ends at token 0"),
    ],
)
def test_off_the_grid_nothing_is_written(segments, said):
    pool, counters = Pool(), native_counters()
    held = [held_segment(start, first, tokens, CSA) for start, first, tokens in segments]
    with pytest.raises(ConfigError, match=r"^native pages are not filled: ") as caught:
        NativePools(pool, GEOMETRY, counters).fill(CSA, held, slots_of([1, 2], 512))
    assert said in str(caught.value)
    assert all(bool((pages == POISON).all()) for pages in pool.pages.values())
    assert (counters["rewrites"], counters["rewrites_refused"]) == (0, 1)


def test_rows_that_are_missing_are_refused_before_anything_is_written():
    pool = Pool()
    pools = NativePools(pool, GEOMETRY, native_counters())
    segment = held_segment(128, 0, 256, CSA)
    short = Held(128, 0, 256, segment.stored, {**segment.rows, "index": segment.rows["index"][1:]})
    with pytest.raises(ConfigError, match="63 rows of store index for 64 places"):
        pools.fill(CSA, [short], slots_of([1], 256))
    with pytest.raises(ConfigError, match="ends at token 256 of 200"):
        pools.fill(CSA, [segment], slots_of([1], 200))
    assert all(bool((pages == POISON).all()) for pages in pool.pages.values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_layout": SimpleNamespace(value="v41")}, "the layout 'v41'; unset SGLANG_DSV4_KV_LAYOUT"),
        ({"request_window": object()}, "request_window"),
        ({"_unified_kv": True}, "_unified_kv True, not False"),
        ({"uniform_fp8": True}, "uniform_fp8"),
        ({"compression_ratios": [0, 4]}, "other compression ratios"),
    ],
)
def test_other_pools_are_refused(changes, said):
    with pytest.raises(ConfigError) as caught:
        NativePools(Pool(**changes), GEOMETRY, native_counters())
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("store", "size", "said"),
    [
        ("window", (64, 37_440), "window page is 64 rows in 37440 bytes, not 256 rows in 149760"),
        ("csa", (64, 33_792), "entries page is 64 rows in 33792 bytes, not 64 rows in 37440"),
        ("index", (64, 8_447), "index page is 64 rows in 8447 bytes, not 64 rows in 8448 (fp8) or 4352 (fp4)"),
    ],
)
def test_other_pages_are_refused(store, size, said):
    pool = Pool()
    pool.sizes[store] = size
    pool.pages[store] = torch.zeros(PAGES, size[1], dtype=torch.uint8)
    pools = NativePools(pool, GEOMETRY, native_counters())
    with pytest.raises(ConfigError) as caught:
        pools.records({"csa": "entries"}.get(store, store), CSA)
    assert said in str(caught.value)
