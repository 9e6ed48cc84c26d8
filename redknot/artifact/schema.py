"""Names: which section lives in which file, and which directory an artifact is.

    <store>/catalogue.sqlite
    <store>/objects/<aa>/<artifact id>/g<generation>/certificate.json
                                                     latents.<first>-<last>.safetensors
                                                     zl.<first>-<last>.r<rank>of<world>.safetensors
                                                     boundary.safetensors
    <store>/tmp/         directories being written; renamed into objects/ when complete
    <store>/quarantine/  files that failed a check

A section is one tensor. Its name is unique in the artifact and is also the tensor's name in the file:

    layers.3.window       rank independent, in latents.<first>-<last>; so are
    layers.3.entries      the compressed entries of CSA and HCA layers and
    layers.3.index_keys   the indexer keys of CSA layers
    layers.3.zl.r0of2     shard of rank 0 of 2, in zl.<first>-<last>.r0of2
    boundary.streams      residual streams at the entry of the last fence, in boundary
    boundary.windows_512  the windows of all layers in front of token 512, where they are kept at checkpoints

Which of them an artifact holds follows from its needs: ``sections.section_specs``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from redknot.errors import StoreError

LAYOUT_VERSION = 1
DEFAULT_LAYER_GROUP = 4

CERTIFICATE_FILE = "certificate.json"
CATALOGUE_FILE = "catalogue.sqlite"
OBJECTS_DIR = "objects"
TEMPORARY_DIR = "tmp"
QUARANTINE_DIR = "quarantine"

_LAYER = r"layers\.(?P<layer>0|[1-9][0-9]{0,4})\."
_KIND = r"(?P<kind>[a-z][a-z0-9_]{0,47})"
_SHARD = r"(?:\.r(?P<rank>0|[1-9][0-9]{0,4})of(?P<world>[1-9][0-9]{0,4}))?"
_LAYER_SECTION = re.compile(_LAYER + _KIND + _SHARD)
_BOUNDARY_SECTION = re.compile(rf"boundary\.{_KIND}")
_ARTIFACT_ID = re.compile(r"[0-9a-f]{64}")
_GENERATION = re.compile(r"g([1-9][0-9]{0,17})")


@dataclass(frozen=True)
class Section:
    """A parsed section name."""

    place: str  # "layers" or "boundary"
    kind: str
    layer: int | None = None
    rank: int | None = None  # None: rank independent
    world: int | None = None


def layer_section(layer: int, kind: str) -> str:
    """Return the name of a rank-independent section of one layer."""
    return _checked(f"layers.{layer}.{kind}")


def shard_section(layer: int, kind: str, rank: int, world: int) -> str:
    """Return the name of one TP rank's shard of a section of one layer."""
    return _checked(f"layers.{layer}.{kind}.r{rank}of{world}")


def boundary_section(kind: str) -> str:
    """Return the name of a section of the whole document."""
    return _checked(f"boundary.{kind}")


def _checked(name: str) -> str:
    parse_section(name)
    return name


def parse_section(name: str) -> Section:
    """Parse a section name; StoreError for any other string (paths, empty parts, unknown places)."""
    match = _LAYER_SECTION.fullmatch(name)
    if match is not None:
        layer, kind, rank, world = match.group("layer", "kind", "rank", "world")
        if rank is None:
            return Section("layers", kind, int(layer))
        if int(rank) < int(world):
            return Section("layers", kind, int(layer), int(rank), int(world))
    match = _BOUNDARY_SECTION.fullmatch(name)
    if match is not None:
        return Section("boundary", match["kind"])
    known = "layers.N.KIND, layers.N.KIND.rRofW, boundary.KIND"
    raise StoreError(f"{name[:80]!r} is not a section name; known: {known}")


def file_of(section: Section, layer_group: int) -> str:
    """Return the file of a section when ``layer_group`` consecutive layers share one file."""
    if section.layer is None:
        return "boundary.safetensors"
    first = section.layer - section.layer % layer_group
    layers = f"{first}-{first + layer_group - 1}"
    if section.rank is None:
        return f"latents.{layers}.safetensors"
    return f"zl.{layers}.r{section.rank}of{section.world}.safetensors"


def sections_by_file(names: Iterable[str], layer_group: int) -> dict[str, list[str]]:
    """Return which sections each file holds, {file: names}, files sorted; StoreError for a malformed name."""
    files: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        files[file_of(parse_section(name), layer_group)].append(name)
    return dict(sorted(files.items()))


def need_is_sharded(need: str) -> bool:
    """Say whether a profile need (``zl``, or ``zl:`` and a head-table hash) is stored per TP rank."""
    return need.partition(":")[0] == "zl"


def check_artifact_id(artifact_id: str) -> str:
    """Return a well-formed artifact id (64 lower-case hex digits); StoreError for anything else."""
    if _ARTIFACT_ID.fullmatch(artifact_id) is None:
        raise StoreError(f"{artifact_id[:80]!r} is not an artifact id (64 lower-case hex digits)")
    return artifact_id


def object_dir(root: Path, artifact_id: str) -> Path:
    """Return the directory that holds an artifact's generations; StoreError for a malformed id."""
    check_artifact_id(artifact_id)
    return root / OBJECTS_DIR / artifact_id[:2] / artifact_id


def generation_dir(root: Path, artifact_id: str, generation: int) -> Path:
    """Return the directory of one generation; StoreError for a malformed id."""
    return object_dir(root, artifact_id) / f"g{generation}"


def parse_generation(name: str) -> int | None:
    """Return the generation that a directory name stands for, None for any other name."""
    match = _GENERATION.fullmatch(name)
    return None if match is None else int(match.group(1))
