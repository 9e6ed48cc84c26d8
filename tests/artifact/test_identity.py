"""Ids are unambiguous, and every difference has a name."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redknot.artifact.identity import (
    ModelIdentity,
    artifact_id_of,
    differences,
    geometry_fields,
    tagged_hash,
    token_array,
    token_hash,
)
from redknot.errors import InputError
from tests.artifact.kit import GEOMETRY, model


def artifact_id(namespace: str, identity: ModelIdentity, needs: list[str], *, world: int = 1) -> str:
    return artifact_id_of(namespace, identity.digest, token_hash([1, 2]), needs, world=world)


FIELDS = st.lists(st.tuples(st.sampled_from(["a", "b", "ab", ""]), st.binary(max_size=3)), max_size=4)


@given(FIELDS, FIELDS)
@settings(max_examples=200, deadline=None)
def test_different_fields_never_share_an_encoding(left: list, right: list) -> None:
    assert (tagged_hash("d", left) == tagged_hash("d", right)) == (left == right)


def test_equal_strings_in_other_places_give_other_ids() -> None:
    """Every assignment of three strings to namespace, adapter, weights, tokenizer, encoder and need differs."""
    ids = set()
    total = 0
    for namespace, adapter, weights, tokenizer, encoder, need in itertools.product(["x", "y", "xy"], repeat=6):
        identity = model(weights_hash=weights, tokenizer_hash=tokenizer, prompt_encoder=encoder, adapter=adapter)
        ids.add(artifact_id(namespace, identity, [need]))
        total += 1
    assert len(ids) == total


def test_needs_are_a_set_and_not_a_string() -> None:
    one = artifact_id("n", model(), ["a", "b"])
    assert one == artifact_id("n", model(), ["b", "a", "b"])
    assert one != artifact_id("n", model(), ["ab"])
    assert one != artifact_id("n", model(), ["a", "b"], world=2)


@pytest.mark.parametrize("field", ["weights_hash", "dtype", "tokenizer_hash", "prompt_encoder", "adapter"])
def test_a_plain_field_is_named(field: str) -> None:
    assert differences(model(), model(**{field: "other"})) == (field,)
    assert artifact_id("n", model(), []) != artifact_id("n", model(**{field: "other"}), [])


def test_a_geometry_field_is_named() -> None:
    changed = GEOMETRY | {"rope": {"main": {"rope_theta": 20000.0}}, "head_dim": 128}
    del changed["num_layers"]
    other = model(geometry=changed)
    assert differences(model(), other) == ("geometry.head_dim", "geometry.num_layers", "geometry.rope.main.rope_theta")
    assert model().config_hash != other.config_hash
    assert differences(model(), model()) == ()


def test_geometry_is_canonical() -> None:
    assert geometry_fields({"a": 1, "b": (1, 2.0)}) == geometry_fields({"b": [1, 2], "a": 1.0})
    assert geometry_fields({"a": True}) != geometry_fields({"a": 1})
    assert geometry_fields({"a": None, "b": {}}) == (("a", "null"), ("b", "{}"))
    for bad in ({"a.b": 1}, {"a": float("nan")}):
        with pytest.raises(ValueError):  # noqa: PT011
            geometry_fields(bad)
    with pytest.raises(TypeError):
        geometry_fields({"a": object()})


def test_an_identity_survives_json() -> None:
    assert ModelIdentity.model_validate_json(model().model_dump_json()) == model()
    assert hash(model()) == hash(model())


@pytest.mark.parametrize(
    "ids", [[1, 2, 3], np.array([1, 2, 3], np.int64), np.array([1, 2, 3], np.uint8), torch.tensor([1, 2, 3])]
)
def test_token_ids_of_any_kind_hash_alike(ids: object) -> None:
    assert token_hash(ids) == token_hash((1, 2, 3)) != token_hash([1, 2, 3, 0])


def test_token_ids_that_are_none() -> None:
    assert token_array([]).shape == (0,)
    for bad in ([[1]], [1.5], [-1], [2**31], ["a"]):
        with pytest.raises(InputError):
            token_array(bad)
