"""Which heads are Global: positions within each output group, the same everywhere or by layer and group.

A ``HeadTable`` is what all code works with. The fixed choice of a profile (``global_heads``) is the table that has the
same positions everywhere; other tables are measured (``redknot profile-heads``) and kept as a file with what was
measured, ``MeasuredHeads``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field, StrictInt, model_validator

from redknot.errors import ConfigError
from redknot.model.geometry import Geometry
from redknot.model.jsonfile import Frozen, read_json

_MOST = 65536  # heads, groups and layers; the models have fewer than 200 of each
_TABLE = "table-"  # in front of a table's hash, so that it is never read as positions
_HASH_DIGITS = 32

Positions: TypeAlias = Annotated[
    tuple[Annotated[StrictInt, Field(ge=0, lt=_MOST)], ...],
    Field(min_length=1),
    AfterValidator(lambda positions: tuple(sorted(positions))),
]
"""Positions within one output group, ascending."""
Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""The positions of some groups, group by group."""


class HeadTable(Frozen):
    """The Global heads of every layer and output group of a model; as many in each group."""

    heads_per_group: Annotated[StrictInt, Field(ge=1, le=_MOST)]
    positions: Annotated[
        tuple[Annotated[tuple[Positions, ...], Field(min_length=1, max_length=_MOST)], ...],
        Field(min_length=1, max_length=_MOST),
    ]  # [layers][groups][Global heads of the group]

    @model_validator(mode="after")
    def _possible(self) -> HeadTable:
        groups, count = len(self.positions[0]), len(self.positions[0][0])
        for number, layer in enumerate(self.positions):
            if len(layer) != groups:
                raise ValueError(f"layer {number} has {len(layer)} groups, layer 0 has {groups}")
            for place, group in enumerate(layer):
                where = f"layer {number}, group {place}: "
                if len(group) != count:
                    raise ValueError(f"{where}{len(group)} Global heads, the first group has {count}")
                if len(set(group)) != count:
                    raise ValueError(f"{where}a head is named twice")
                if group[-1] >= self.heads_per_group:
                    raise ValueError(f"{where}Global head {group[-1]} in groups of {self.heads_per_group} heads")
        return self

    @property
    def per_group(self) -> int:
        """Global heads in each group."""
        return len(self.positions[0][0])

    @property
    def shape(self) -> str:
        """The size in words: "12 layers, 2 groups of 8 heads"."""
        return _shape(len(self.positions), len(self.positions[0]), self.heads_per_group)

    def misfit(self, geometry: Geometry) -> str:
        """Why this is no table of a model, one clause; empty when it is."""
        model = _shape(geometry.num_layers, geometry.o_groups, geometry.heads_per_group)
        return "" if self.shape == model else f"the head table is of a model of {self.shape}; this one has {model}"

    def name(self, fence_layers: int) -> str:
        """What artifacts call the choice between the fences: its positions where it is fixed, else its hash.

        Only these layers are Local anywhere, so tables that agree there are the same choice.
        """
        middle = self.positions[fence_layers : len(self.positions) - fence_layers]
        chosen = {group for layer in middle for group in layer}
        if len(chosen) == 1:
            return fixed_name(chosen.pop())
        text = f"{self.heads_per_group}:{middle}"
        return _TABLE + hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]


def fixed_table(geometry: Geometry, positions: tuple[int, ...]) -> HeadTable:
    """The same ``positions`` in every layer and group of a model."""
    layers = ((tuple(positions),) * geometry.o_groups,) * geometry.num_layers
    return HeadTable(heads_per_group=geometry.heads_per_group, positions=layers)


def fixed_name(positions: tuple[int, ...]) -> str:
    """What artifacts call a fixed choice."""
    return ",".join(str(position) for position in sorted(positions))


def named_table(name: str, fence_layers: int, geometry: Geometry, table: HeadTable | None) -> HeadTable:
    """The table behind the name in an artifact's needs: a fixed one follows from it, another must be ``table``.

    ValueError when it is not: what is computed for one table must not be stored as another's.
    """
    if not name.startswith(_TABLE):
        return fixed_table(geometry, tuple(int(position) for position in name.split(",")))
    if table is None or table.name(fence_layers) != name:
        raise ValueError(f"the needs name the head table {name}, which is not the one given")
    return table


def _shape(layers: int, groups: int, heads: int) -> str:
    return f"{layers} layers, {groups} groups of {heads} heads"


class HeadModel(Frozen):
    """The model that was measured: hashes of its identity."""

    weights_hash: str
    config_hash: str
    tokenizer_hash: str
    dtype: str


class HeadCorpus(Frozen):
    """What it was measured on, and how much of it."""

    digest: str  # over the token ids of all documents
    documents: Annotated[int, Field(ge=1)]  # distinct ones that were read
    tokens: Annotated[int, Field(ge=1)]
    measured: Annotated[int, Field(ge=1)]  # documents
    rows: Annotated[int, Field(ge=1)]  # their tokens
    context: Annotated[int, Field(ge=0)]  # tokens in front of each that were asked for
    seed: int  # of the choice of the contexts


Drift: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Remaining(Frozen):
    """Mean drift of the Local heads, over all layers, under the fixed choice of the first positions and the table."""

    fixed: Drift
    table: Drift


class MeasuredHeads(Frozen):
    """A head table as a file: the choice, and what it follows from."""

    format: Literal["redknot-heads"] = "redknot-heads"
    version: Literal[1] = 1
    model: HeadModel
    corpus: HeadCorpus
    table: HeadTable
    remaining: Remaining
    drifts: tuple[tuple[tuple[Drift, ...], ...], ...]  # [layers][groups][heads of the group]

    @model_validator(mode="after")
    def _fits(self) -> MeasuredHeads:
        table = self.table
        sizes = [[len(group) for group in layer] for layer in self.drifts]
        if sizes != [[table.heads_per_group] * len(layer) for layer in table.positions]:
            raise ValueError(f"drifts are not those of {table.shape}")
        return self


def load_heads(path: Path) -> MeasuredHeads:
    """Read a head table's file; ConfigError names what is wrong with it."""
    if not path.is_file():
        raise ConfigError(f"head table {path}: there is no such file; `redknot profile-heads` makes one")
    return read_json(path, "head table", MeasuredHeads)
