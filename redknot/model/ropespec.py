"""The two rotary kinds of a DeepSeek-V4 configuration."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass

from redknot.errors import UnsupportedModelError
from redknot.model.values import Values


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


def rope_specs(values: Values) -> tuple[RopeSpec, RopeSpec]:
    """The main kind and the compressed kind of a configuration in either spelling; raises as ``Values`` does.

    UnsupportedModelError for scaling other than DeepSeek-V4's.
    """
    nested = values.inner("rope_parameters")
    if nested.has("main") and nested.has("compress"):
        parts = [nested.inner(part) for part in ("main", "compress")]
        main, compress = (_rope_spec(part, _theta(part, "rope_theta")) for part in parts)
        return main, compress
    scaling = nested if nested.found else values.inner("rope_scaling")
    main = RopeSpec(_theta(values, "rope_theta", 10000.0))
    return main, _rope_spec(scaling, _theta(values, "compress_rope_theta", 160000.0))


def _theta(values: Values, key: str, default: float | None = None) -> float:
    return values.number(key, default, above=1.0)


def _rope_spec(values: Values, theta: float) -> RopeSpec:
    kind = values.raw("rope_type", values.raw("type", "default"))
    if kind == "default":
        return RopeSpec(theta)
    if kind != "yarn":
        raise UnsupportedModelError(f"config.json: rope type {reprlib.repr(kind)} is neither default nor yarn")
    for key, only in (("attention_factor", 1), ("truncate", True)):  # the amplitude and the ramp of DeepSeek-V4
        found = values.raw(key, only)
        if found != only:
            shown = reprlib.repr(found)
            raise UnsupportedModelError(f"config.json: rope {key} {shown} is not supported, only {only}")
    return RopeSpec(
        theta,
        YarnScaling(
            factor=values.number("factor"),
            original_max_positions=values.count("original_max_position_embeddings"),
            beta_fast=values.number("beta_fast", 32.0),
            beta_slow=values.number("beta_slow", 1.0),
        ),
    )
