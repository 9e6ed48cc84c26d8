"""Model geometry: what a checkpoint's ``config.json`` says, as one frozen value.

Two spellings are read: DeepSeek's own keys (``compress_ratios``, ``num_hash_layers``, ``qk_rope_head_dim``,
``rope_scaling``) and those ``transformers`` saves (``layer_types``, ``compress_rates``, ``mlp_layer_types``,
``rope_parameters``). The meaning of each follows ``transformers.models.deepseek_v4.configuration_deepseek_v4``.
Nothing here is a default of one model: a key that decides the arithmetic must be present or have the default
that the reference configuration class gives it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from redknot.errors import CheckpointError, UnsupportedModelError
from redknot.model.configfile import read_config

MODEL_TYPE = "deepseek_v4"


class LayerKind(StrEnum):
    """The three attention layers of DeepSeek-V4; the values are transformers' ``layer_types``."""

    SLIDING = "sliding_attention"
    CSA = "compressed_sparse_attention"
    HCA = "heavily_compressed_attention"


@dataclass(frozen=True)
class YarnScaling:
    """YaRN context extension (arXiv 2309.00071); the amplitude is always 1 in DeepSeek-V4."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class RopeSpec:
    """One kind of rotary embedding: its base and, for compressed layers, its YaRN scaling."""

    theta: float
    yarn: YarnScaling | None = None


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
        for field, value in vars(self).items():
            if type(value) is int and value < 1 and field != "bos_token_id":
                raise CheckpointError(f"config.json: {field} is {value}; it must be positive")
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
                raise CheckpointError(f"config.json: {message}")


def load_geometry(checkpoint: Path) -> Geometry:
    """Read the geometry of a checkpoint folder; raises as ``read_config`` and ``geometry_from_config`` do."""
    return geometry_from_config(read_config(checkpoint))


def geometry_from_config(config: Mapping[str, Any]) -> Geometry:
    """Translate a configuration in either spelling; raises CheckpointError, UnsupportedModelError for other models."""
    try:
        _refuse_other_models(config)
        return _geometry(config)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"config.json: a value has the wrong type ({error})") from None


def _geometry(config: Mapping[str, Any]) -> Geometry:
    layers = int(_need(config, "num_hidden_layers"))
    kinds, csa_ratio, hca_ratio = _layer_kinds(config, layers)
    head_dim = int(_need(config, "head_dim"))
    main, compress = _rope_specs(config)
    eos = config.get("eos_token_id", 1)
    return Geometry(
        vocab_size=int(_need(config, "vocab_size")),
        hidden_size=int(_need(config, "hidden_size")),
        num_heads=int(_need(config, "num_attention_heads")),
        head_dim=head_dim,
        rope_dim=_rope_dim(config, head_dim),
        q_lora_rank=int(_need(config, "q_lora_rank")),
        o_groups=int(_need(config, "o_groups")),
        o_lora_rank=int(_need(config, "o_lora_rank")),
        num_experts=int(_need(config, "n_routed_experts")),
        experts_per_token=int(_need(config, "num_experts_per_tok")),
        num_shared_experts=1,
        expert_width=int(_need(config, "moe_intermediate_size")),
        scoring=str(config.get("scoring_func", "sqrtsoftplus")),
        routed_scale=float(config.get("routed_scaling_factor", 1.5)),
        swiglu_limit=float(config.get("swiglu_limit", 10.0)),
        window=int(_need(config, "sliding_window")),
        csa_ratio=csa_ratio,
        hca_ratio=hca_ratio,
        kinds=kinds,
        hash_layers=_hash_layers(config, layers),
        index_heads=int(_need(config, "index_n_heads")),
        index_head_dim=int(_need(config, "index_head_dim")),
        index_topk=int(_need(config, "index_topk")),
        hc_mult=int(_need(config, "hc_mult")),
        hc_sinkhorn_iters=int(config.get("hc_sinkhorn_iters", 20)),
        hc_eps=float(config.get("hc_eps", 1e-6)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_main=main,
        rope_compress=compress,
        max_positions=int(config.get("max_position_embeddings", 1048576)),
        bos_token_id=config.get("bos_token_id", 0),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else ((eos,) if eos is not None else ()),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
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


def _refuse_other_models(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    names = f"{model_type} {config.get('architectures')}".lower().replace(".", "_")
    nested = config.get("text_config") or {}  # where V4.1 keeps its geometry
    keys = any(source.get(key) is not None for source in (config, nested) for key in _V41_KEYS)
    if "v4_1" in names or "v41" in names or keys:
        raise UnsupportedModelError("DeepSeek-V4.1 has another layout and is not supported; use DeepSeek-V4")
    if model_type != MODEL_TYPE:
        raise UnsupportedModelError(f"model_type {model_type!r} is not supported; RedKnot serves {MODEL_TYPE!r}")
    for key, (value, meaning) in _FIXED.items():
        if config.get(key) not in (None, value):
            raise UnsupportedModelError(f"config.json: {key} {config[key]!r} is not supported; DeepSeek-V4 {meaning}")


def _need(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise CheckpointError(f"config.json: {key} is missing")
    return config[key]


def _layer_kinds(config: Mapping[str, Any], layers: int) -> tuple[tuple[LayerKind, ...], int, int]:
    rates = dict(config.get("compress_rates") or {})
    csa = int(config.get("compress_rate_csa") or rates.get(LayerKind.CSA, 4))
    hca = int(config.get("compress_rate_hca") or rates.get(LayerKind.HCA, 128))
    if config.get("layer_types") is not None:
        try:
            kinds = tuple(LayerKind(name) for name in config["layer_types"])
        except ValueError as error:
            raise UnsupportedModelError(f"config.json: layer_types: {error}") from None
    else:
        ratios = list(_need(config, "compress_ratios"))
        table = {0: LayerKind.SLIDING, csa: LayerKind.CSA, hca: LayerKind.HCA}
        unknown = sorted({ratio for ratio in ratios if ratio not in table})
        if unknown:
            raise UnsupportedModelError(f"config.json: compress_ratios {unknown} are none of 0, {csa}, {hca}")
        kinds = tuple(table[ratio] for ratio in ratios)
    if not 0 < layers <= len(kinds):
        raise CheckpointError(f"config.json: {len(kinds)} layer kinds for num_hidden_layers {layers}")
    return kinds[:layers], csa, hca


def _hash_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    types = config.get("mlp_layer_types")
    if types is not None:
        unknown = sorted(set(types) - {"hash_moe", "moe"})
        if unknown:
            raise UnsupportedModelError(f"config.json: mlp_layer_types {unknown} are neither hash_moe nor moe")
        return tuple(name == "hash_moe" for name in types[:layers])
    count = int(config.get("num_hash_layers", 3))
    return tuple(layer < count for layer in range(layers))


def _rope_dim(config: Mapping[str, Any], head_dim: int) -> int:
    if config.get("partial_rotary_factor") is not None:
        return int(head_dim * config["partial_rotary_factor"])
    return int(config.get("qk_rope_head_dim", head_dim * 64 // 512))


def _rope_specs(config: Mapping[str, Any]) -> tuple[RopeSpec, RopeSpec]:
    nested = config.get("rope_parameters") or {}
    if isinstance(nested.get("main"), Mapping) and isinstance(nested.get("compress"), Mapping):
        return _rope_spec(nested["main"], None), _rope_spec(nested["compress"], None)
    scaling = nested or config.get("rope_scaling") or {}
    main = RopeSpec(float(config.get("rope_theta", 10000.0)))
    return main, _rope_spec(scaling, float(config.get("compress_rope_theta", 160000.0)))


def _rope_spec(parameters: Mapping[str, Any], theta: float | None) -> RopeSpec:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    base = theta if theta is not None else float(_need(parameters, "rope_theta"))
    if kind == "default":
        return RopeSpec(base)
    if kind != "yarn":
        raise UnsupportedModelError(f"config.json: rope type {kind!r} is neither default nor yarn")
    for key, value in (("attention_factor", 1), ("truncate", True)):  # the amplitude and the ramp of DeepSeek-V4
        if parameters.get(key) not in (None, value):
            raise UnsupportedModelError(f"config.json: rope {key} {parameters[key]!r} is not supported, only {value}")
    return RopeSpec(
        base,
        YarnScaling(
            factor=float(_need(parameters, "factor")),
            original_max_positions=int(_need(parameters, "original_max_position_embeddings")),
            beta_fast=float(parameters.get("beta_fast", 32)),
            beta_slow=float(parameters.get("beta_slow", 1)),
        ),
    )
