"""Tensor names: three spellings of one DeepSeek-V4 checkpoint, and the tensors a geometry calls for.

Canonical names are DeepSeek's own (``layers.3.attn.wq_a.weight``). ``transformers`` saves a mixture of those and
of its module names (``model.layers.3.attn.norm.weight`` is the latent's norm), and its state dict has module names
throughout (``model.layers.3.self_attn.q_a_proj.weight``, with all experts of a layer in one tensor).
"""

from __future__ import annotations

import re
from collections.abc import Collection

from redknot.model.geometry import Geometry, LayerKind

_IGNORED = re.compile(r"(model\.)?mtp\.")
_LAYER = re.compile(r"layers\.(0|[1-9]\d*)\.(.+)")
_EXPERT = re.compile(r"experts\.(0|[1-9]\d*)\.(.+)")
_SCALE_SUFFIXES = (".scale", ".weight_scale_inv")

# Where a module holds another's parts, transformers nests the indexer inside the compressor.
_MODULES = (
    ("self_attn.", "attn."),
    ("mlp.", "ffn."),
    ("attn.compressor.indexer.q_b_proj.", "attn.indexer.wq_b."),
    ("attn.compressor.indexer.scorer.", "attn.indexer."),
    ("attn.compressor.indexer.", "attn.indexer.compressor."),
)
_MODEL = {
    "embed.weight": ("embed_tokens.weight",),
    "head.weight": ("lm_head.weight",),
    "norm.weight": (),
    "hc_head_fn": ("hc_head.hc_fn",),
    "hc_head_base": ("hc_head.hc_base",),
    "hc_head_scale": ("hc_head.hc_scale",),
}
_COMPRESSOR = {
    "wkv.weight": ("kv_proj.weight",),
    "wgate.weight": ("gate_proj.weight",),
    "norm.weight": ("kv_norm.weight",),
    "ape": ("position_bias",),
}
_SHARED = {"w1.weight": "gate_proj.weight", "w2.weight": "down_proj.weight", "w3.weight": "up_proj.weight"}
_PARTS: dict[str, tuple[str, ...]] = {
    "attn_norm.weight": ("input_layernorm.weight",),
    "ffn_norm.weight": ("post_attention_layernorm.weight",),
    **{f"hc_{side}_{part}": (f"{side}_hc.{part}",) for side in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "attn.attn_sink": ("attn.sinks",),
    "attn.wq_a.weight": ("attn.q_a_proj.weight",),
    "attn.q_norm.weight": ("attn.q_a_norm.weight",),
    "attn.wq_b.weight": ("attn.q_b_proj.weight",),
    "attn.wkv.weight": ("attn.kv_proj.weight",),
    "attn.kv_norm.weight": ("attn.norm.weight",),
    "attn.wo_a.weight": ("attn.o_a_proj.weight",),
    "attn.wo_b.weight": ("attn.o_b_proj.weight",),
    "attn.indexer.wq_b.weight": (),
    "attn.indexer.weights_proj.weight": (),
    **{
        f"attn.{module}.{leaf}": tuple(f"attn.{module}.{other}" for other in others)
        for module in ("compressor", "indexer.compressor")
        for leaf, others in _COMPRESSOR.items()
    },
    "ffn.gate.weight": (),
    "ffn.gate.bias": ("ffn.gate.e_score_correction_bias",),
    "ffn.gate.tid2eid": (),
    "ffn.experts.w13": ("ffn.experts.gate_up_proj",),
    "ffn.experts.w2": ("ffn.experts.down_proj",),
    **{f"ffn.shared_experts.{leaf}": (f"ffn.shared_experts.{other}",) for leaf, other in _SHARED.items()},
}


def _spellings(table: dict[str, tuple[str, ...]]) -> dict[str, str]:
    return {spelling: name for name, others in table.items() for spelling in (name, *others)}


_MODEL_SPELLINGS = _spellings(_MODEL)
_PART_SPELLINGS = _spellings(_PARTS)
_EXPERT_SPELLINGS = {spelling: leaf for leaf, other in _SHARED.items() for spelling in (leaf, other)}


def ignored(name: str) -> bool:
    """Whether a tensor belongs to the multi-token-prediction head, which RedKnot does not run."""
    return _IGNORED.match(name) is not None


def canonical_name(name: str) -> str | None:
    """The canonical name of a tensor in any spelling, None when it is not one of DeepSeek-V4's.

    Transformers' fused experts become ``layers.N.ffn.experts.w13`` and ``.w2``; the scale of a quantised
    ``X.weight`` becomes ``X.scale``.
    """
    plain = _unscaled_name(name)
    if plain is not None:
        return plain
    for suffix in _SCALE_SUFFIXES:
        if name.endswith(suffix):
            weight = _unscaled_name(f"{name.removesuffix(suffix)}.weight")
            return scale_name(weight) if weight is not None else None
    return None


def scale_name(weight: str) -> str:
    """The canonical name of the scale that belongs to a canonical weight."""
    return f"{weight.removesuffix('.weight')}.scale"


def _unscaled_name(name: str) -> str | None:
    name = name.removeprefix("model.")
    if name in _MODEL_SPELLINGS:
        return _MODEL_SPELLINGS[name]
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    layer, part = match.groups()
    for module, canonical in _MODULES:
        if part.startswith(module):
            part = canonical + part.removeprefix(module)
    expert = _EXPERT.fullmatch(part.removeprefix("ffn."))
    if expert is not None and part.startswith("ffn."):
        leaf = _EXPERT_SPELLINGS.get(expert[2])
        return f"layers.{layer}.ffn.experts.{expert[1]}.{leaf}" if leaf is not None else None
    known = _PART_SPELLINGS.get(part)
    return f"layers.{layer}.{known}" if known is not None else None


def expected_shapes(geometry: Geometry, fused: Collection[int] = ()) -> dict[str, tuple[int, ...]]:
    """Canonical name and shape of every tensor; routed experts one by one, but as two tensors in ``fused`` layers."""
    g = geometry
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (g.vocab_size, g.hidden_size)}
    shapes["norm.weight"] = (g.hidden_size,)
    if not g.tie_embeddings:
        shapes["head.weight"] = (g.vocab_size, g.hidden_size)
    shapes |= _hyper_connection_shapes(g, "hc_head", g.hc_mult, 1)
    for layer in range(g.num_layers):
        for part, shape in (_block_shapes(g, layer) | _moe_shapes(g, layer, layer in fused)).items():
            shapes[f"layers.{layer}.{part}"] = shape
    return shapes


def _hyper_connection_shapes(g: Geometry, prefix: str, rows: int, scales: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}_fn": (rows, g.hc_mult * g.hidden_size),
        f"{prefix}_base": (rows,),
        f"{prefix}_scale": (scales,),
    }


def _compressor_shapes(g: Geometry, prefix: str, ratio: int, width: int, copies: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.wkv.weight": (copies * width, g.hidden_size),
        f"{prefix}.wgate.weight": (copies * width, g.hidden_size),
        f"{prefix}.norm.weight": (width,),
        f"{prefix}.ape": (ratio, copies * width),
    }


def _block_shapes(g: Geometry, layer: int) -> dict[str, tuple[int, ...]]:
    mixes = (2 + g.hc_mult) * g.hc_mult
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (g.hidden_size,),
        "ffn_norm.weight": (g.hidden_size,),
        **_hyper_connection_shapes(g, "hc_attn", mixes, 3),
        **_hyper_connection_shapes(g, "hc_ffn", mixes, 3),
        "attn.attn_sink": (g.num_heads,),
        "attn.wq_a.weight": (g.q_lora_rank, g.hidden_size),
        "attn.q_norm.weight": (g.q_lora_rank,),
        "attn.wq_b.weight": (g.num_heads * g.head_dim, g.q_lora_rank),
        "attn.wkv.weight": (g.head_dim, g.hidden_size),
        "attn.kv_norm.weight": (g.head_dim,),
        "attn.wo_a.weight": (g.o_groups * g.o_lora_rank, g.heads_per_group * g.head_dim),
        "attn.wo_b.weight": (g.hidden_size, g.o_groups * g.o_lora_rank),
    }
    kind = g.kinds[layer]
    overlap = 2 if kind is LayerKind.CSA else 1
    if kind is not LayerKind.SLIDING:
        shapes |= _compressor_shapes(g, "attn.compressor", g.ratio(layer), g.head_dim, overlap)
    if kind is LayerKind.CSA:
        shapes |= _compressor_shapes(g, "attn.indexer.compressor", g.ratio(layer), g.index_head_dim, overlap)
        shapes["attn.indexer.wq_b.weight"] = (g.index_heads * g.index_head_dim, g.q_lora_rank)
        shapes["attn.indexer.weights_proj.weight"] = (g.index_heads, g.hidden_size)
    return shapes


def _moe_shapes(g: Geometry, layer: int, fused: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"ffn.gate.weight": (g.num_experts, g.hidden_size)}
    if g.hash_layers[layer]:
        shapes["ffn.gate.tid2eid"] = (g.vocab_size, g.experts_per_token)
    else:
        shapes["ffn.gate.bias"] = (g.num_experts,)
    widths = {"ffn.shared_experts": g.expert_width * g.num_shared_experts}
    if fused:
        shapes["ffn.experts.w13"] = (g.num_experts, 2 * g.expert_width, g.hidden_size)
        shapes["ffn.experts.w2"] = (g.num_experts, g.hidden_size, g.expert_width)
    else:
        widths |= {f"ffn.experts.{expert}": g.expert_width for expert in range(g.num_experts)}
    for prefix, width in widths.items():
        shapes[f"{prefix}.w1.weight"] = (width, g.hidden_size)
        shapes[f"{prefix}.w2.weight"] = (g.hidden_size, width)
        shapes[f"{prefix}.w3.weight"] = (width, g.hidden_size)
    return shapes
