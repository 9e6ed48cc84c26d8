"""Everything of SGLang 0.5.23 that the CUDA adapter relies on, as data, and its comparison with what is installed.

The comparison reads SGLang's source (``source.py``). What only a running server has, the shapes of its pools, is
checked where they are read (``pools.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from redknot.errors import ConfigError
from redknot.latents.formats import FP8, FP8_INDEX8
from redknot.latents.layout import SGLANG_PAGE_TOKENS, model_layout
from redknot.model.geometry import LayerKind, geometry_from_config
from redknot.model.published import published_config
from sglang_patches.cuda.source import Source, package_folder, short_digest
from sglang_patches.versions import SUPPORTED

_SRT = "srt."
MODEL = _SRT + "models.deepseek_v4"
POOL = _SRT + "mem_cache.deepseek_v4_memory_pool"
ALLOCATOR = _SRT + "mem_cache.allocator."
RUNNER = _SRT + "model_executor.runner."
_DSV4 = "kernels.ops.attention.dsv4."
DEQUANTISED = _DSV4 + "dequant_k_cache"
FP4 = "kernels.ops.quantization.fp4_indexer_quant"


@dataclass(frozen=True)
class Call:
    """A function or ``Class.method`` that is called, hooked or overridden (=: by keyword only)."""

    module: str
    name: str
    parameters: str
    why: str


@dataclass(frozen=True)
class Members:
    """A class and the attributes that its methods set."""

    module: str
    name: str
    attributes: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Constant:
    """What a name of a module is set to, as it is written."""

    module: str
    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Text:
    """A function whose arithmetic is followed byte by byte: the digest of how it is written."""

    module: str
    name: str
    digest: str
    why: str


@dataclass(frozen=True)
class File:
    """The same of a whole file."""

    path: str
    digest: str
    why: str


CALLS = (
    Call(MODEL, "DeepseekV4ForCausalLM.__init__", "self config quant_config prefix", "the model that ours extends"),
    Call(
        MODEL,
        "DeepseekV4ForCausalLM.forward",
        "self input_ids positions forward_batch input_embeds pp_proxy_tensors",
        "runs every row that is not ours",
    ),
    Call(MODEL, "DeepseekV4ForCausalLM.load_weights", "self weights is_nextn", "ours loads the engine behind it"),
    Call(_SRT + "models.registry", "import_model_classes", "package_name strict", "finds a model by its class name"),
    Call(_SRT + "managers.schedule_policy", "PrefillAdder.add_one_req",
         "self req has_chunked_req truncation_align_size", "keeps prefills of the two kinds apart"),
    Call(RUNNER + "decode_cuda_graph_runner", "DecodeCudaGraphRunner.can_run_graph", "self forward_batch",
         "a replayed graph would not ask the model whose rows they are"),
    Call(RUNNER + "prefill_cuda_graph_runner", "PrefillCudaGraphRunner.can_run_graph", "self forward_batch",
         "the same of a prefill"),
    Call(ALLOCATOR + "paged", "PagedTokenToKVPoolAllocator._release_page_ids", "self *page_ids", "tells freed pages"),
    Call(ALLOCATOR + "paged", "PagedTokenToKVPoolAllocator.clear", "self", "tells that all are free"),
    Call(_SRT + "model_executor.forward_context", "get_req_to_token_pool", "", "the slots of a request"),
    Call(POOL, "DeepSeekV4TokenToKVPool.get_swa_raw_buffer", "self layer_id", "pages of window latents"),
    Call(POOL, "DeepSeekV4TokenToKVPool.get_swa_key_page_size", "self", "their rows"),
    Call(POOL, "DeepSeekV4TokenToKVPool.translate_loc_from_full_to_swa", "self kv_indices", "their slots"),
    Call(POOL, "DeepSeekV4TokenToKVPool.get_extra_key_buffer", "self layer_id", "pages of compressed entries"),
    Call(POOL, "DeepSeekV4TokenToKVPool.get_extra_key_page_size", "self layer_id", "their rows"),
    Call(POOL, "DeepSeekV4TokenToKVPool.get_index_k_with_scale_buffer", "self layer_id", "pages of indexer keys"),
    Call(POOL, "DeepSeekV4TokenToKVPool.get_index_k_page_size", "self compress_ratio", "their rows"),
)  # fmt: skip
MEMBERS = (
    Members(
        POOL,
        "DeepSeekV4TokenToKVPool",
        ("_unified_kv", "compression_ratios", "kv_layout", "request_window", "swa_kv_pool", "uniform_fp8"),
        "which of SGLang's layouts the pools have",
    ),
    Members(ALLOCATOR + "swa", "SWATokenToKVPoolAllocator", ("full_attn_allocator", "swa_attn_allocator"),
            "tells pages of tokens from pages of windows"),
    Members(MODEL, "DeepseekV4ForCausalLM", ("config", "lm_head", "logits_processor"), "the model that ours extends"),
)  # fmt: skip
CONSTANTS = (
    Constant(MODEL, "EntryClass", "[DeepseekV4ForCausalLM]", "the name under which ours takes its place"),
    Constant(DEQUANTISED, "DIM_NOPE", "448", "a record"),
    Constant(DEQUANTISED, "DIM_ROPE", "64", "a record"),
    Constant(DEQUANTISED, "TILE_SIZE", "64", "a record"),
    Constant(POOL, "DeepSeekV4IndexerPool.quant_block_size", "128", "an indexer key"),
)
TEXTS = (
    Text(FP4, "_ceil_ue8m0_exp", "18d56ccd259f", "scales of fp4 keys"),
    Text(FP4, "_fp4_e2m1_code", "838f7e00ce7a", "how fp4 keys are rounded"),
    Text(FP4, "quantize_fp4_indexer_row", "b0118b813dcd", "how fp4 keys are packed"),
    Text(POOL, "DeepSeekV4SingleKVPool.create_buffer", "7b2bf10586b7", "shape and dtype of pages of latents"),
    Text(POOL, "DeepSeekV4IndexerPool._create_buffer", "20cd5e9a28c4", "shape and dtype of pages of indexer keys"),
    Text(
        POOL,
        "DeepSeekV4TokenToKVPool._init_compressed_pools",
        "09f86291ffef",
        "a compressed slot is a token's slot // ratio",
    ),
    Text(POOL, "get_dsv4_indexer_bytes_per_token", "ce6ffc404a1c", "bytes of an indexer key"),
    Text(
        _SRT + "layers.attention.dsa.dsa_indexer",
        "rotate_activation",
        "3d8122def859",
        "the scale of the Hadamard transform",
    ),
)
FILES = (
    File("kernels/ops/attention/dsv4/kv_layout.py", "85f012a8a5c3", "bytes of a page of latents, where its rows lie"),
    File("kernels/jit/csrc/deepseek_v4/fused_norm_rope_v2.cuh", "54f4ba03b3be",
           "norm, rotation, Hadamard transform and quantisation of entries and indexer keys, in this order"),
    File("kernels/jit/csrc/deepseek_v4/store.cuh", "70e40c3765e8", "quantisation of latents and fp8 keys"),
)  # fmt: skip


def installed() -> Source:
    """The installed SGLang; ConfigError where there is none."""
    folder = package_folder("sglang")
    if folder is None:
        raise ConfigError(f"sglang is not installed; supported: {', '.join(SUPPORTED)}")
    return Source(folder)


def require(source: Source) -> None:
    """ConfigError, in one line with what differs and what to do, where SGLang is not what the adapter was made for."""
    found = list(differences(source))
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ConfigError(
            f"this SGLang is not what --device cuda was made for: {found[0]}{more};"
            f" install sglang=={SUPPORTED[-1]} unchanged, or serve with --device cpu"
        )


def differences(source: Source) -> Iterator[str]:
    """One line for everything that is not there, or not as it was."""
    for call in CALLS:
        found = source.parameters(call.module, call.name)
        yield from _unless(found == call.parameters, call, found, call.parameters)
    for members in MEMBERS:
        missing = sorted(set(members.attributes) - source.attributes(members.module, members.name))
        if missing:
            yield f"sglang.{members.module}.{members.name} has no {', '.join(missing)} ({members.why})"
    for constant in CONSTANTS:
        found = source.value(constant.module, constant.name)
        yield from _unless(found == constant.value, constant, found, constant.value)
    for text in TEXTS:
        written = source.text(text.module, text.name)
        digest = None if written is None else short_digest(written.encode())
        yield from _unless(digest == text.digest, text, digest, text.digest)
    for file in FILES:
        digest = source.digest(file.path)
        if digest != file.digest:
            yield f"sglang's {file.path} is {digest or 'not there'}, not {file.digest} ({file.why})"


def _unless(holds: bool, item: Call | Constant | Text, found: str | None, wanted: str) -> Iterator[str]:
    if not holds:
        what = "not there" if found is None else f"({found})" if isinstance(item, Call) else found
        wanted = f"({wanted})" if isinstance(item, Call) else wanted
        yield f"sglang.{item.module}.{item.name} is {what}, not {wanted} ({item.why})"


def record_pages() -> Iterator[tuple[str, int, int, tuple[int, int, int]]]:
    """Pages of records: what, rows, bytes, and (data stride, first scale, scale stride) in bytes."""
    pages = model_layout(geometry_from_config(published_config("flash")), FP8).pages(SGLANG_PAGE_TOKENS)
    for what, kind, store in (
        ("window latents", LayerKind.CSA, "window"),
        ("CSA entries", LayerKind.CSA, "entries"),
        ("HCA entries", LayerKind.HCA, "entries"),
    ):
        block = pages[kind][store]
        data, scales = block.regions
        yield what, data.rows, block.nbytes, (data.row.nbytes, scales.offset, scales.row.nbytes)


def index_pages() -> dict[str, int]:
    """Bytes of a page of indexer keys, by their precision."""
    geometry = geometry_from_config(published_config("flash"))
    layouts = {"fp8": FP8_INDEX8, "fp4": FP8}
    return {
        name: model_layout(geometry, precision).pages(SGLANG_PAGE_TOKENS)[LayerKind.CSA]["index"].nbytes
        for name, precision in layouts.items()
    }
