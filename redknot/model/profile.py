"""Reuse profiles: which rows run how, as validated, content-hashed data."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator, model_validator

from redknot.errors import ConfigError
from redknot.model.geometry import Geometry
from redknot.model.heads import HeadTable, fixed_name, fixed_table, load_heads
from redknot.model.jsonfile import Frozen, read_json
from redknot.model.policy import Policy, Selector, Treatment

REUSE, DENSE, FAN_OUT = "reuse", "dense", "fan-out"
ARMS = (REUSE, DENSE, FAN_OUT)
"""What a request ran as: rows read from artifacts; every row as recompute runs it; every row with fewer experts."""


_FOLDER = "folder"  # in the context of a validation: where the file lies that is read


class FanOutPolicy(Frozen):
    """Adaptive expert fan-out of the middle layers; see :class:`redknot.ops.moe.FanOut`.

    The three largest of six weights hold at least half of their sum: with ``k_min`` 3 any ``tau`` up to 0.5 is a fixed
    top three.
    """

    k_min: Annotated[int, Field(ge=1)] = 3
    tau: Annotated[float, Field(gt=0, le=1)]


class Protected(Frozen):
    """Document rows that always run, beside the query and new text."""

    first_windows: Annotated[int, Field(ge=0)] = 1  # windows at the start of each relocated run
    last_windows: Annotated[int, Field(ge=0)] = 1  # windows at its end
    recent_tail: Annotated[int, Field(ge=0)] = 0  # tokens before the end of the request
    indexed_share: Annotated[float, Field(ge=0, le=1)] = 0.05  # cap of the rows a selector protects, of candidates


class Profile(Policy, Frozen):
    """One way to trade recomputation for quality.

    ``deviation_layer`` counts for the selector ``deviation`` alone. Latents of layer 0 depend on the token only, and
    up to the first compressed layer on the sliding windows before it. What lies further back, other documents that is,
    shows behind a compressed layer, its single facts behind a CSA layer: the default lies behind the first one of
    nano (two sliding layers, HCA, CSA), of V4-Flash and of V4-Pro.

    ``head_table`` takes the place of ``global_heads`` where layers and groups differ in their Global heads. A profile's
    file may name the file of a measured one, by its path from there; its positions become part of the profile.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    fence_layers: Annotated[int, Field(ge=0)] = 1  # first and last, each
    fence_idle: Treatment = Treatment.FULL
    middle_active: Treatment = Treatment.FULL
    middle_idle: Treatment = Treatment.SKIP
    protected: Protected = Protected()
    selector: Selector = Selector.INDEXER
    deviation_layer: Annotated[int, Field(ge=0)] = 4  # whose latents the selector "deviation" compares
    budget: Annotated[float, Field(ge=0, le=1)] = 0.10  # Active rows as a share of the candidates
    fan_out: FanOutPolicy | None = None  # of the middle layers, whichever rows run in them
    global_heads: tuple[Annotated[int, Field(ge=0)], ...] = (0,)  # positions within each output group
    prefix_cache: bool = False  # keep the exact latents of earlier requests' prefixes
    head_table: HeadTable | None = None  # positions by layer and group instead

    @field_validator("head_table", mode="before")
    @classmethod
    def _read(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, str):
            return value
        if info.context is None:
            raise ValueError("only a profile in a file may name a head table by its path")
        return load_heads(info.context[_FOLDER] / value).table

    @model_validator(mode="after")
    def _possible(self) -> Profile:
        if self.fence_idle is Treatment.GLOBAL_Z:
            raise ValueError("fence_idle must be full or skip")
        if self.fence_idle is Treatment.SKIP and self.fence_layers and not self.reuses_rows:
            raise ValueError("fence_idle skip needs middle_idle skip: rows enter the middle from the first fence")
        if self.middle_active is Treatment.SKIP and self.budget > 0:
            raise ValueError("active rows that skip need budget 0")
        wants = self.budget > 0 or self.protected.indexed_share > 0
        if wants and self.selector is Selector.NONE and self.reuses_rows:
            raise ValueError("a budget or indexed_share needs a selector")
        if self.picks_rows and not self.reuses_rows:
            raise ValueError(
                f"selector {self.selector} needs middle_idle skip, else no latents are restored for it to read; "
                "set selector none, or budget and indexed_share 0"
            )
        if self.middle_active is Treatment.GLOBAL_Z and self.middle_idle is Treatment.FULL:
            raise ValueError("middle_active global+z with middle_idle full restores nothing: no row becomes active")
        if self.splits_heads and not self.fence_layers:
            raise ValueError("global+z needs at least one fence layer: the last layer keeps no Z_L")
        if not self.global_heads or len(set(self.global_heads)) != len(self.global_heads):
            raise ValueError("global_heads must name distinct positions, at least one")
        if self.prefix_cache and self.arm != DENSE:
            raise ValueError("prefix_cache needs middle_idle full and no fan_out: other latents are not a prefix's own")
        if self.head_table is not None and self.global_heads != (0,):
            raise ValueError("head_table takes the place of global_heads; give one of them")
        return self

    @property
    def arm(self) -> str:
        """What a report calls a request that ran as the profile says: one of ``ARMS``."""
        if self.reuses:
            return REUSE
        return DENSE if self.fan_out is None else FAN_OUT

    @property
    def global_per_group(self) -> int:
        """Global heads in each output group."""
        return len(self.global_heads) if self.head_table is None else self.head_table.per_group

    def heads(self, geometry: Geometry) -> HeadTable:
        """The Global heads of every layer and group of a model that the profile fits."""
        return fixed_table(geometry, self.global_heads) if self.head_table is None else self.head_table

    def needs(self) -> tuple[str, ...]:
        """What an artifact must hold, sorted; parts that depend on the profile name what they depend on."""
        needs = set(self.row_needs())
        if self.splits_heads:
            table = self.head_table
            name = fixed_name(self.global_heads) if table is None else table.name(self.fence_layers)
            needs.add(f"zl:{self.fence_layers}:{name}")
        return tuple(sorted(needs))

    def digest(self) -> str:
        """Content hash (hex SHA-256 of the canonical JSON) recorded in reports."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def misfit(profile: Profile, geometry: Geometry) -> str:
    """Why a model of this geometry cannot run the profile, one clause; empty when it can."""
    layers, fences = geometry.num_layers, profile.fence_layers
    if 2 * fences >= layers:
        return f"{layers} layers leave no middle for {fences}+{fences} fence layers"
    if profile.head_table is not None and (problem := profile.head_table.misfit(geometry)):
        return problem
    if profile.splits_heads and profile.global_per_group >= geometry.heads_per_group:
        return f"all {geometry.heads_per_group} heads of a group are Global, none is Local"
    if max(profile.global_heads) >= geometry.heads_per_group:
        return f"Global head {max(profile.global_heads)} in groups of {geometry.heads_per_group} heads"
    if profile.selector is Selector.DEVIATION and profile.deviation_layer >= layers:
        return f"deviation_layer {profile.deviation_layer}, but its layers are 0 to {layers - 1}"
    return ""


RECOMPUTE = Profile(
    name="recompute",
    fence_layers=0,
    middle_active=Treatment.FULL,
    middle_idle=Treatment.FULL,
    selector=Selector.NONE,
    budget=0.0,
    protected=Protected(indexed_share=0.0),
)
_HEADSPLIT = Profile(
    name="headsplit",
    middle_active=Treatment.GLOBAL_Z,
    middle_idle=Treatment.GLOBAL_Z,
    selector=Selector.NONE,
    budget=0.0,
    protected=Protected(indexed_share=0.0),
)
_TURBO = Profile(
    name="turbo",
    fence_layers=0,
    fence_idle=Treatment.SKIP,
    selector=Selector.NONE,
    budget=0.0,
    protected=Protected(last_windows=0, indexed_share=0.0),
)
SHIPPED = {
    profile.name: profile
    for profile in (
        RECOMPUTE,
        _HEADSPLIT,
        Profile(name="combined", middle_active=Treatment.GLOBAL_Z),
        Profile(name="rowsparse"),
        _TURBO,
    )
}
"""Recomputation and four ways of reuse, with nano's fences (one layer) and no recent tail.

V4-Flash's (three layers) are files: ``configs/profiles/flash-*.json``.
"""


def load_profile(name_or_path: str) -> Profile:
    """A shipped profile by exact name, or a JSON file; ConfigError names what is wrong."""
    if name_or_path in SHIPPED:
        return SHIPPED[name_or_path]
    path = Path(name_or_path)
    if not path.is_file():
        raise ConfigError(f"profile {name_or_path!r} is neither a file nor one of {', '.join(SHIPPED)}")
    return read_json(path, "profile", Profile, {_FOLDER: path.parent})
