"""Packed rows moved to other positions: into the pages that native kernels read, and back.

Kernels of ours never do this: they turn queries, and what is stored stays as it is (docs/decisions/0007). Native
kernels read keys as they lie, so that a latent which was computed elsewhere must be turned, and with it quantised once
more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from redknot.errors import ConfigError
from redknot.ops.hadamard import hadamard
from redknot.ops.records import Records, pack_, unpack
from redknot.ops.rope import Rotation, rotate


@dataclass(frozen=True)
class Stored:
    """Packed rows; ``transformed``: behind the Hadamard transform, as SGLang keeps indexer keys."""

    records: Records
    transformed: bool = False


def relocate_(source: Stored, rows: Tensor, rotation: Rotation | None, target: Stored, slots: Tensor) -> int:
    """Write rows of ``source`` by number [n], turned by ``rotation``, into ``slots`` [n] of ``target``, each once.

    ``rotation`` holds the angles of the n rows, or of one for all; None moves nothing: rows of one format and transform
    are then copied byte for byte. A pair of numbers of which one is negative or past its pages is skipped, and its slot
    stays as it is. Returns how many rows were rewritten, that is quantised once more. ConfigError where source and
    target have other widths, or more channels turn than a row has.
    """
    _refuse(source.records, rows, rotation, target.records, slots)
    seen = (rows >= 0) & (rows < source.records.capacity) & (slots >= 0) & (slots < target.records.capacity)
    at, to = rows[seen], slots[seen]
    if rotation is None and (source.records.format, source.transformed) == (target.records.format, target.transformed):
        _copy_(source.records, at, target.records, to)
        return 0
    values = unpack(source.records, at)
    plain = hadamard(values) if source.transformed else values
    if rotation is not None:
        chosen = seen if len(rotation.cos) == len(rows) else torch.zeros_like(at)
        plain = rotate(plain, Rotation(rotation.cos[chosen], rotation.sin[chosen]))
    pack_(target.records, to, hadamard(plain) if target.transformed else plain)
    return len(at)


def _copy_(source: Records, rows: Tensor, target: Records, slots: Tensor) -> None:
    """The bytes of rows, padding left out."""
    (page, row), (to, slot) = ((at // held.rows, at % held.rows) for held, at in ((source, rows), (target, slots)))
    target.data[to, slot] = source.data[page, row]
    target.scales[to, slot] = source.scales[page, row]
    if source.format.rope:
        target.rope[to, slot] = source.rope[page, row]


def _refuse(source: Records, rows: Tensor, rotation: Rotation | None, target: Records, slots: Tensor) -> None:
    if source.format.width != target.format.width:
        raise ConfigError(f"relocate: {source.format.width} channels do not fit into {target.format.width}")
    if rows.shape != slots.shape or rows.dim() != 1:
        raise ConfigError(f"relocate: rows {list(rows.shape)} and slots {list(slots.shape)} are not one list each")
    if rotation is None:
        return
    if len(rotation.cos) not in (1, len(rows)):
        raise ConfigError(f"relocate: {len(rotation.cos)} angles for {len(rows)} rows")
    if 2 * rotation.cos.shape[-1] > source.format.width:
        raise ConfigError(f"relocate: {2 * rotation.cos.shape[-1]} channels to turn in rows of {source.format.width}")
