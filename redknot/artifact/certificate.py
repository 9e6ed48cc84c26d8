"""The certificate of an artifact: what it was computed from, what it holds, and whether a caller may use it.

It is a JSON file beside the sections. Names of documents are not in it: they belong to the catalogue.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from redknot.artifact.files import checksum
from redknot.artifact.header import DTYPES, TensorSpec, file_bytes
from redknot.artifact.identity import ModelIdentity, artifact_id_of, differences
from redknot.artifact.needs import lacking
from redknot.artifact.reasons import LayoutVersionError, MalformedFileError
from redknot.artifact.schema import DEFAULT_LAYER_GROUP, LAYOUT_VERSION, file_of, need_is_sharded, parse_section
from redknot.errors import RequestReason, StoreError

# The checksum is over the stored bytes, so it holds whatever serialises the same values in a later version.
_ENVELOPE = re.compile(
    rb'\{"certificate":(?P<body>.*),\n"checksum":"(?P<checksum>[a-z0-9-]+:[0-9a-f]+)"\}\n', re.DOTALL
)

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)


class SectionRecord(BaseModel):
    """Where one section is and what its bytes must be."""

    model_config = _STRICT

    file: str
    dtype: str  # safetensors name
    shape: tuple[int, ...]
    nbytes: int
    checksum: str  # tagged, over the tensor's bytes
    channels: tuple[int, int] | None = None  # sharded sections: [first, last) of the unsharded last axis


class Certificate(BaseModel):
    """Everything a reader must agree with before it uses an artifact; section names are sorted."""

    model_config = _STRICT

    layout_version: int
    artifact_id: str
    namespace: str
    model: ModelIdentity
    token_count: int
    token_hash: str
    needs: tuple[str, ...]  # what the artifact can serve, e.g. "latents", "window_tail", "zl:<head table>"
    world: int  # TP size of the sharded sections, 1 without any
    layer_group: int  # consecutive layers in one file
    generation: int
    created: float  # seconds since the epoch
    sections: dict[str, SectionRecord]

    @model_validator(mode="after")
    def _consistent(self) -> Certificate:
        if self.layer_group < 1 or self.world < 1 or self.generation < 1 or self.token_count < 0:
            raise ValueError("layer_group, world and generation must be at least 1, token_count at least 0")
        if list(self.sections) != sorted(self.sections) or list(self.needs) != sorted(set(self.needs)):
            raise ValueError("sections and needs must be sorted and unique")
        derived = artifact_id_of(self.namespace, self.model.digest, self.token_hash, self.needs, world=self.world)
        # Another layout version derives another id; parse_certificate refuses it by its own name.
        if self.layout_version == LAYOUT_VERSION and self.artifact_id != derived:
            raise ValueError("artifact_id does not follow from the other fields")
        sharded = set()
        for name, record in self.sections.items():
            try:
                section = parse_section(name)
            except StoreError as error:
                raise ValueError(str(error)) from error
            if record.file != file_of(section, self.layer_group) or record.dtype not in DTYPES:
                raise ValueError(f"{name} names another file or an unknown dtype")
            if section.world is not None:
                sharded.add(section.world)
        if sharded - {self.world} or (self.world > 1 and not sharded):
            raise ValueError(f"world is {self.world}, sharded sections are of {sorted(sharded) or 'none'}")
        return self

    @property
    def nbytes(self) -> int:
        """Bytes on disk: the files of all sections with their headers, and this certificate."""
        files: defaultdict[str, dict[str, TensorSpec]] = defaultdict(dict)
        for name, record in self.sections.items():
            files[record.file][name] = (record.dtype, record.shape)
        return sum(map(file_bytes, files.values())) + len(self.to_json())

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the certificate: what TP ranks compare before they vote."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def to_json(self) -> bytes:
        """Return the file's bytes: the certificate and a checksum over it."""
        body = self.model_dump_json()
        return f'{{"certificate":{body},\n"checksum":"{checksum(body.encode())}"}}\n'.encode()


def parse_certificate(data: bytes) -> Certificate:
    """Parse a certificate file strictly.

    LayoutVersionError for another layout, MalformedFileError for anything else that is not a certificate of
    this layout: a checksum that does not fit, unknown or missing keys, wrong types.
    """
    match = _ENVELOPE.fullmatch(data)
    if match is None or checksum(match.group("body")) != match.group("checksum").decode():
        raise MalformedFileError("not a certificate, or damaged: its checksum does not fit")
    body = match.group("body")
    try:
        version = json.loads(body)["layout_version"]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise MalformedFileError(f"certificate is not readable: {error}") from error
    if type(version) is int and version != LAYOUT_VERSION:
        raise LayoutVersionError(f"artifact layout version {version}, supported {LAYOUT_VERSION}: build it again")
    try:
        return Certificate.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MalformedFileError(f"certificate is not valid at {where or 'top level'}: {first['msg']}") from error


@dataclass(frozen=True)
class CertificateDraft:
    """What the builder knows before anything is written."""

    namespace: str
    model: ModelIdentity
    needs: tuple[str, ...]
    world: int = 1
    layer_group: int = DEFAULT_LAYER_GROUP


@dataclass(frozen=True)
class Expected:
    """What a reader is about to rely on."""

    namespace: str
    model: ModelIdentity
    token_hash: str
    needs: tuple[str, ...]
    world: int = 1
    generation: int | None = None  # None: any
    # Every section that will be read; a spec is compared, None asks only that the section is there.
    sections: Mapping[str, TensorSpec | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """Why a certificate may not be used, and the fields that differ."""

    reason: RequestReason
    fields: tuple[str, ...]
    message: str


def validate(certificate: Certificate, expected: Expected) -> Refusal | None:
    """Return why the certificate does not cover what is expected, None when it does.

    Checked in order, the first fault wins: layout, geometry and TP size, identity and namespace, tokens, needs,
    sections, generation.
    """
    if certificate.layout_version != LAYOUT_VERSION:
        found = f"layout version {certificate.layout_version}, supported {LAYOUT_VERSION}"
        return Refusal(RequestReason.GEOMETRY_MISMATCH, ("layout_version",), found)
    fields = differences(certificate.model, expected.model)
    geometry = tuple(name for name in fields if name.startswith("geometry."))
    if geometry:
        return _refusal(RequestReason.GEOMETRY_MISMATCH, geometry, "the model's configuration differs in")
    if certificate.world != expected.world and _reads_shards(expected):
        found = f"artifact built for TP size {certificate.world}, served at TP size {expected.world}"
        return Refusal(RequestReason.GEOMETRY_MISMATCH, ("world",), found)
    if certificate.namespace != expected.namespace:
        fields += ("namespace",)
    if fields:
        return _refusal(RequestReason.IDENTITY_MISMATCH, fields, "the artifact belongs to another identity:")
    if certificate.token_hash != expected.token_hash:
        return _refusal(RequestReason.TOKEN_MISMATCH, ("token_hash",), "the artifact is of other tokens:")
    missing = lacking(expected.needs, certificate.needs)
    if missing:
        return _refusal(RequestReason.PROFILE_MISMATCH, missing, "the artifact was built without")
    refusal = _check_sections(certificate, expected.sections)
    if refusal is None and expected.generation not in (None, certificate.generation):
        found = f"generation {certificate.generation}, expected {expected.generation}"
        return Refusal(RequestReason.STALE_GENERATION, ("generation",), found)
    return refusal


def _check_sections(certificate: Certificate, expected: Mapping[str, TensorSpec | None]) -> Refusal | None:
    missing = tuple(sorted(name for name in expected if name not in certificate.sections))
    if missing:
        return _refusal(RequestReason.MISSING_LAYER, missing, "the artifact lacks")
    other = tuple(
        sorted(
            name
            for name, spec in expected.items()
            if spec is not None and spec != (certificate.sections[name].dtype, certificate.sections[name].shape)
        )
    )
    if other:
        return _refusal(RequestReason.GEOMETRY_MISMATCH, other, "sections of another dtype or shape:")
    return None


def _reads_shards(expected: Expected) -> bool:
    if any(need_is_sharded(need) for need in expected.needs):
        return True
    return any(parse_section(name).world is not None for name in expected.sections)


def _refusal(reason: RequestReason, fields: Iterable[str], prefix: str) -> Refusal:
    names = tuple(fields)
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return Refusal(reason, names, f"{prefix} {shown}")
