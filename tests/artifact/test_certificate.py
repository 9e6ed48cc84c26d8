"""A certificate is strict, and says what is wrong in the right class with the right names."""

import json
from dataclasses import replace

import pytest

from redknot.artifact.certificate import Certificate, Expected, parse_certificate, validate
from redknot.artifact.files import checksum
from redknot.artifact.identity import token_hash
from redknot.artifact.reasons import LayoutVersionError, MalformedFileError, request_reason
from redknot.artifact.store import ArtifactStore
from redknot.errors import CorruptSectionError, RequestReason, StoreError
from tests.artifact.kit import GEOMETRY, NAMESPACE, TOKENS, draft, model, publish, sections


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    with ArtifactStore(tmp_path_factory.mktemp("x") / "store", create=True) as store:
        return publish(store, draft(world=2), sections(world=2), TOKENS)


@pytest.fixture
def expected(certificate: Certificate) -> Expected:
    return Expected(
        namespace=NAMESPACE,
        model=model(),
        token_hash=token_hash(TOKENS),
        needs=("latents", "zl"),
        world=2,
        generation=1,
        sections={"layers.0.entries": ("BF16", (7, 16)), "layers.3.zl.r1of2": None},
    )


def resealed(certificate: Certificate, change: dict, *, drop: tuple[str, ...] = ()) -> bytes:
    """The certificate's file with some fields changed and the right checksum over the result."""
    body = json.loads(certificate.model_dump_json()) | change
    for name in drop:
        del body[name]
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    return f'{{"certificate":{text},\n"checksum":"{checksum(text.encode())}"}}\n'.encode()


def test_round_trip(certificate: Certificate) -> None:
    again = parse_certificate(certificate.to_json())
    assert again == certificate
    assert again.digest == certificate.digest
    assert parse_certificate(resealed(certificate, {})) == certificate
    assert certificate.token_count == len(TOKENS)
    assert certificate.sections["layers.2.zl.r1of2"].channels == (4, 8)
    assert certificate.sections["layers.2.entries"].channels is None


@pytest.mark.parametrize("field", ["model", "needs", "sections", "unknown"])
def test_nesting_without_end(certificate: Certificate, field: str) -> None:
    body = certificate.model_dump_json().removesuffix("}")
    text = f'{body},"{field}":{"[" * 100_000}{"]" * 100_000}}}'
    with pytest.raises(MalformedFileError):
        parse_certificate(f'{{"certificate":{text},\n"checksum":"{checksum(text.encode())}"}}\n'.encode())


@pytest.mark.parametrize(
    "change",
    [
        {"unknown": 1},
        {"generation": "1"},
        {"generation": 0},
        {"generation": True},
        {"token_count": -1},
        {"needs": ["zl", "latents"]},
        {"namespace": "tenant-b"},
        {"artifact_id": "0" * 64},
        {"world": 4},
        {"layer_group": 0},
        {"layer_group": 2},
        {"sections": {"../x": {}}},
        {"model": {}},
        {"layout_version": "1"},
    ],
)
def test_altered_certificates_are_refused(certificate: Certificate, change: dict) -> None:
    with pytest.raises(MalformedFileError):
        parse_certificate(resealed(certificate, change))


def test_missing_fields_and_section_paths(certificate: Certificate) -> None:
    for name in Certificate.model_fields:
        with pytest.raises(MalformedFileError):
            parse_certificate(resealed(certificate, {}, drop=(name,)))
    body = json.loads(certificate.model_dump_json())["sections"]
    body["boundary.streams"]["file"] = "../../../etc/passwd"
    with pytest.raises(MalformedFileError, match="names another file"):
        parse_certificate(resealed(certificate, {"sections": body}))
    body["boundary.streams"] |= {"file": "boundary.safetensors", "dtype": "PICKLE"}
    with pytest.raises(MalformedFileError, match="unknown dtype"):
        parse_certificate(resealed(certificate, {"sections": body}))


def test_another_layout_is_named(certificate: Certificate) -> None:
    with pytest.raises(LayoutVersionError, match="layout version 2, supported 1"):
        parse_certificate(resealed(certificate, {"layout_version": 2, "something_new": 1}))


def test_no_flipped_bit_or_cut_passes(certificate: Certificate) -> None:
    data = certificate.to_json()
    for at in {*range(0, len(data), 17), *range(40), *range(len(data) - 80, len(data))}:
        damaged = bytearray(data)
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(MalformedFileError):
            parse_certificate(bytes(damaged))
        with pytest.raises(MalformedFileError):
            parse_certificate(data[:at])


def test_a_body_that_is_not_json(certificate: Certificate) -> None:
    for body in (b"[" * 100_000, b"{", b"[]", b"\xff"):
        with pytest.raises(MalformedFileError, match="not readable"):
            parse_certificate(b'{"certificate":' + body + f',\n"checksum":"{checksum(body)}"}}\n'.encode())


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b'{"certificate": 1}', b"\xff" * 40, b"[" * 100_000])
def test_files_that_are_no_certificate(data: bytes) -> None:
    with pytest.raises(MalformedFileError):
        parse_certificate(data)


def test_what_fits_is_accepted(certificate: Certificate, expected: Expected) -> None:
    assert validate(certificate, expected) is None
    assert validate(certificate, replace(expected, generation=None, needs=())) is None
    # Nothing sharded is read: any TP size is served.
    unsharded = replace(expected, world=8, needs=("latents",), sections={"layers.0.entries": None})
    assert validate(certificate, unsharded) is None


GEOMETRY_OTHER = GEOMETRY | {"rope": {"main": {"rope_theta": 5e5}}}


@pytest.mark.parametrize(
    ("change", "reason", "fields"),
    [
        ({"model": model(geometry=GEOMETRY_OTHER)}, "geometry_mismatch", ("geometry.rope.main.rope_theta",)),
        ({"world": 4}, "geometry_mismatch", ("world",)),
        ({"world": 4, "needs": ("latents",)}, "geometry_mismatch", ("world",)),
        ({"sections": {"layers.0.entries": ("BF16", (8, 16))}}, "geometry_mismatch", ("layers.0.entries",)),
        ({"sections": {"layers.0.entries": ("U8", (7, 16))}}, "geometry_mismatch", ("layers.0.entries",)),
        ({"model": model(weights_hash="x")}, "identity_mismatch", ("weights_hash",)),
        ({"model": model(tokenizer_hash="x", adapter="a")}, "identity_mismatch", ("tokenizer_hash", "adapter")),
        ({"namespace": "tenant-b"}, "identity_mismatch", ("namespace",)),
        ({"token_hash": token_hash(TOKENS[1:])}, "token_mismatch", ("token_hash",)),
        ({"needs": ("latents", "window_all", "zl")}, "profile_mismatch", ("window_all",)),
        ({"sections": {"layers.6.entries": None}}, "missing_layer", ("layers.6.entries",)),
        ({"generation": 2}, "stale_generation", ("generation",)),
    ],
)
def test_every_reason(
    certificate: Certificate, expected: Expected, change: dict, reason: str, fields: tuple[str, ...]
) -> None:
    refusal = validate(certificate, replace(expected, **change))
    assert refusal is not None
    assert refusal.reason is RequestReason(reason)
    assert refusal.fields == fields
    assert "\n" not in refusal.message


def test_both_tp_sizes_are_named(certificate: Certificate, expected: Expected) -> None:
    refusal = validate(certificate, replace(expected, world=4))
    assert refusal is not None
    assert "TP size 2" in refusal.message
    assert "TP size 4" in refusal.message


def test_an_unknown_layout_version_in_memory(certificate: Certificate, expected: Expected) -> None:
    refusal = validate(certificate.model_copy(update={"layout_version": 9}), expected)
    assert refusal is not None
    assert refusal.fields == ("layout_version",)


def test_reasons_of_errors() -> None:
    assert request_reason(CorruptSectionError("x")) is RequestReason.CORRUPT_SECTION
    assert request_reason(LayoutVersionError("x")) is RequestReason.GEOMETRY_MISMATCH
    assert request_reason(StoreError("x")) is RequestReason.STORE_UNAVAILABLE
