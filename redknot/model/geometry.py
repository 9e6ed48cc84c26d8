"""Model geometry: what a checkpoint's ``config.json`` says, as one frozen value.

Two spellings are read: DeepSeek's own keys (``compress_ratios``, ``num_hash_layers``, ``qk_rope_head_dim``,
``rope_scaling``) and those ``transformers`` saves (``layer_types``, ``compress_rates``, ``mlp_layer_types``,
``rope_parameters``). The meaning of each follows ``transformers.models.deepseek_v4.configuration_deepseek_v4``.
Nothing here is a default of one model: a key that decides the arithmetic must be present or have the default
that the reference configuration class gives it.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from redknot.errors import ConfigError, UnsupportedModelError
from redknot.model.configfile import read_config
from redknot.model.ropespec import RopeSpec, rope_specs
from redknot.model.values import Values

MODEL_TYPE = "deepseek_v4"


class LayerKind(StrEnum):
    """The three attention layers of DeepSeek-V4; the values are transformers' ``layer_types``."""

    SLIDING = "sliding_attention"
    CSA = "compressed_sparse_attention"
    HCA = "heavily_compressed_attention"


@dataclass(frozen=True)
class Geometry:
    """Everything the arithmetic depends on; sizes are counts of elements, lengths are tokens."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    expert_width: int
    scoring: str
    routed_scale: float
    swiglu_limit: float
    window: int
    csa_ratio: int
    hca_ratio: int
    kinds: tuple[LayerKind, ...]
    hash_layers: tuple[bool, ...]
    index_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    norm_eps: float
    rope_main: RopeSpec
    rope_compress: RopeSpec
    max_positions: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    tie_embeddings: bool

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.kinds)

    @property
    def heads_per_group(self) -> int:
        """Query heads in one group of the output projection."""
        return self.num_heads // self.o_groups

    @property
    def block_length(self) -> int:
        """Tokens in one block: the least common multiple of the strides (128 for V4)."""
        return math.lcm(*(self.ratio(layer) or 1 for layer in range(self.num_layers)), self.csa_ratio)

    def ratio(self, layer: int) -> int:
        """Tokens per compressed entry of a layer, 0 for a sliding layer."""
        kind = self.kinds[layer]
        return {LayerKind.SLIDING: 0, LayerKind.CSA: self.csa_ratio, LayerKind.HCA: self.hca_ratio}[kind]

    def rope(self, layer: int) -> RopeSpec:
        """The rotary kind of a layer: plain on sliding layers, the compressed kind elsewhere."""
        return self.rope_main if self.kinds[layer] is LayerKind.SLIDING else self.rope_compress

    def shardable(self) -> dict[str, int]:
        """What tensor-parallel ranks divide among themselves, by name."""
        return {
            "output groups": self.o_groups,
            "routed experts": self.num_experts,
            "shared expert width": self.expert_width * self.num_shared_experts,
        }

    def identity_fields(self) -> dict[str, Any]:
        """The fields as plain JSON values, for identities whose mismatch names the field."""
        return dict(asdict(self))

    def __post_init__(self) -> None:
        """Refuse a geometry whose parts cannot fit together."""
        checks = {
            "num_attention_heads must divide into o_groups": self.num_heads % self.o_groups == 0,
            "qk_rope_head_dim must be even and at most head_dim": self.rope_dim % 2 == 0
            and 0 < self.rope_dim <= min(self.head_dim, self.index_head_dim),
            "num_experts_per_tok must not exceed n_routed_experts": self.experts_per_token <= self.num_experts,
            "the CSA and HCA compression rates must differ": self.csa_ratio != self.hca_ratio,
            "layer_types and mlp_layer_types must have the same length": len(self.kinds) == len(self.hash_layers),
            "scoring_func must be sqrtsoftplus, softmax or sigmoid": self.scoring
            in ("sqrtsoftplus", "softmax", "sigmoid"),
        }
        for message, holds in checks.items():
            if not holds:
                raise ConfigError(f"config.json: {message}")


def load_geometry(checkpoint: Path) -> Geometry:
    """Read the geometry of a checkpoint folder; raises as ``read_config`` and ``geometry_from_config`` do."""
    return geometry_from_config(read_config(checkpoint))


def geometry_from_config(config: Mapping[str, Any]) -> Geometry:
    """Translate a configuration in either spelling; raises ConfigError, UnsupportedModelError for other models."""
    values = Values(config)
    _refuse_other_models(values)
    layers = values.count("num_hidden_layers", most=_MOST_NAMED)
    kinds, csa_ratio, hca_ratio = _layer_kinds(values, layers)
    head_dim, vocab_size = values.count("head_dim"), values.count("vocab_size")
    max_positions = values.count("max_position_embeddings", 1048576)
    main, compress = rope_specs(values)
    return Geometry(
        vocab_size=vocab_size,
        hidden_size=values.count("hidden_size"),
        num_heads=values.count("num_attention_heads"),
        head_dim=head_dim,
        rope_dim=_rope_dim(values, head_dim),
        q_lora_rank=values.count("q_lora_rank"),
        o_groups=values.count("o_groups"),
        o_lora_rank=values.count("o_lora_rank"),
        num_experts=values.count("n_routed_experts", most=_MOST_NAMED),
        experts_per_token=values.count("num_experts_per_tok"),
        num_shared_experts=1,
        expert_width=values.count("moe_intermediate_size"),
        scoring=values.raw("scoring_func", "sqrtsoftplus"),
        routed_scale=values.number("routed_scaling_factor", 1.5),
        swiglu_limit=values.number("swiglu_limit", 10.0),
        window=values.count("sliding_window", most=min(max_positions, _MOST_WINDOW)),
        csa_ratio=csa_ratio,
        hca_ratio=hca_ratio,
        kinds=kinds,
        hash_layers=_hash_layers(values, layers),
        index_heads=values.count("index_n_heads"),
        index_head_dim=values.count("index_head_dim"),
        index_topk=values.count("index_topk"),
        hc_mult=values.count("hc_mult"),
        hc_sinkhorn_iters=values.count("hc_sinkhorn_iters", 20, most=_MOST_SINKHORN),
        hc_eps=values.number("hc_eps", 1e-6),
        norm_eps=values.number("rms_norm_eps", 1e-6),
        rope_main=main,
        rope_compress=compress,
        max_positions=max_positions,
        bos_token_id=_bos(values, vocab_size),
        eos_token_ids=_eos(values, vocab_size),
        tie_embeddings=values.flag("tie_word_embeddings", False),
    )


# Keys that only the V4.1 layout has (SGLang 0.5.23, configs/deepseek_v4.py): it shares entries between layers.
_V41_KEYS = ("kv_source_layer_ids", "index_source_layer_ids", "late_layer_start", "engram_layer_ids")
# Keys that may only have one value, since the arithmetic here is written for it.
_FIXED = {
    "attention_bias": (False, "has no biases"),
    "mlp_bias": (False, "has no biases"),
    "norm_topk_prob": (True, "normalises the chosen experts"),
    "hidden_act": ("silu", "gates with silu"),
    "num_key_value_heads": (1, "shares one latent"),
    "n_shared_experts": (1, "has one shared expert"),
}


# Sizes that no tensor's shape contradicts, so that a slip of the pen would take all time or memory.
_MOST_SINKHORN = 1000  # a row normalises that often in every layer; the models say 20
_MOST_WINDOW = 65536  # keys of a few rows at once; the models say 128
_MOST_NAMED = 4096  # layers and experts have tensors of their own names; the models say 61 and 384


def _refuse_other_models(values: Values) -> None:
    config, nested = values.found, values.inner("text_config")  # where V4.1 keeps its geometry
    model_type = config.get("model_type")
    names = reprlib.repr([model_type, config.get("architectures")]).lower().replace(".", "_")
    keys = any(source.has(key) for source in (values, nested) for key in _V41_KEYS)
    if "v4_1" in names or "v41" in names or keys:
        raise UnsupportedModelError("DeepSeek-V4.1 has another layout and is not supported; use DeepSeek-V4")
    if model_type != MODEL_TYPE:
        shown = reprlib.repr(model_type)
        raise UnsupportedModelError(f"model_type {shown} is not supported; RedKnot serves {MODEL_TYPE!r}")
    for key, (value, meaning) in _FIXED.items():
        if config.get(key) not in (None, value):
            shown = reprlib.repr(config[key])
            raise UnsupportedModelError(f"config.json: {key} {shown} is not supported; DeepSeek-V4 {meaning}")


def _layer_kinds(values: Values, layers: int) -> tuple[tuple[LayerKind, ...], int, int]:
    rates = values.inner("compress_rates")
    csa, hca = (
        values.count(alone) if values.has(alone) else rates.count(kind, default)
        for alone, kind, default in (
            ("compress_rate_csa", LayerKind.CSA, 4),
            ("compress_rate_hca", LayerKind.HCA, 128),
        )
    )
    if values.has("layer_types"):
        try:
            kinds = tuple(LayerKind(name) for name in values.items("layer_types", str))
        except ValueError as error:
            raise UnsupportedModelError(f"config.json: layer_types: {error}") from None
    else:
        ratios = values.items("compress_ratios", int)
        table = {0: LayerKind.SLIDING, csa: LayerKind.CSA, hca: LayerKind.HCA}
        unknown = sorted({ratio for ratio in ratios if ratio not in table})
        if unknown:
            raise UnsupportedModelError(f"config.json: compress_ratios {unknown} are none of 0, {csa}, {hca}")
        kinds = tuple(table[ratio] for ratio in ratios)
    if layers > len(kinds):
        raise ConfigError(f"config.json: {len(kinds)} layer kinds for num_hidden_layers {layers}")
    return kinds[:layers], csa, hca


def _hash_layers(values: Values, layers: int) -> tuple[bool, ...]:
    if values.has("mlp_layer_types"):
        types = values.items("mlp_layer_types", str)
        unknown = sorted(set(types) - {"hash_moe", "moe"})
        if unknown:
            raise UnsupportedModelError(f"config.json: mlp_layer_types {unknown} are neither hash_moe nor moe")
        return tuple(name == "hash_moe" for name in types[:layers])
    count = values.count("num_hash_layers", 3, least=0)
    return tuple(layer < count for layer in range(layers))


def _bos(values: Values, vocab_size: int) -> int | None:
    """The id in front of every request; a null says that there is none, a missing key is the reference's 0."""
    absent = "bos_token_id" in values.found and not values.has("bos_token_id")
    return None if absent else values.count("bos_token_id", 0, least=0, most=vocab_size - 1)


def _eos(values: Values, vocab_size: int) -> tuple[int, ...]:
    """The ids that end an answer: one, or a list of them; as with BOS, null is none and a missing key 1."""
    found = values.found.get("eos_token_id", 1)
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if any(type(index) is not int or not 0 <= index < vocab_size for index in ids):
        raise values.refused("eos_token_id", f"token ids from 0 to {vocab_size - 1}")
    return tuple(ids)


def _rope_dim(values: Values, head_dim: int) -> int:
    if values.has("partial_rotary_factor"):
        return int(head_dim * values.number("partial_rotary_factor", most=1.0))
    return values.count("qk_rope_head_dim", head_dim * 64 // 512)
