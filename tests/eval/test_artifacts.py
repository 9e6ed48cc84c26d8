"""Artifacts for all arms at once: few kinds, each document once, found the second time."""

from __future__ import annotations

import pytest

from eval.arms import find_arms
from eval.artifacts import Builder, targets
from redknot.errors import ConfigError
from redknot.model.geometry import load_geometry
from redknot.model.profile import SHIPPED, Profile
from redknot.model.tokenizer import load_tokenizer
from tests.kit.corpus import document


def profiles(*names):
    return [SHIPPED[name] for name in names]


def test_arms_share_artifacts_where_one_serves_them(checkpoint):
    geometry = load_geometry(checkpoint)
    (one,) = targets(geometry, profiles("recompute", "rowsparse", "turbo", "combined"), 1)
    assert set(one.needs) >= {"latents", "window_all", "streams:1", "zl:1:0"}
    assert targets(geometry, profiles("recompute"), 1) == []


def test_arms_that_no_artifact_serves_together_get_two_kinds(checkpoint):
    geometry = load_geometry(checkpoint)
    other = Profile(name="other", middle_active="global+z", global_heads=(1,))
    first, second = targets(geometry, [*profiles("combined"), other, *profiles("turbo")], 1)
    assert "zl:1:0" in first.needs
    assert "zl:1:1" in second.needs


def test_an_arm_that_does_not_fit_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="arm deep does not fit the model: 4 layers leave no middle"):
        targets(load_geometry(checkpoint), [Profile(name="deep", fence_layers=2)], 1)


def test_documents_are_built_once(checkpoint, tmp_path):
    geometry = load_geometry(checkpoint)
    tokenizer = load_tokenizer(checkpoint, geometry)
    documents = [tokenizer.encode(document(length, length)) for length in (40, 70, 40)]
    arms = find_arms(["rowsparse", "turbo"])
    builder = Builder(checkpoint, tmp_path / "store", targets(geometry, [arm.profile for arm in arms.values()], 1))
    built = builder.build("d", documents)
    assert (built.documents, built.tokens, built.found) == (2, 110, 0)
    assert built.seconds > 0
    assert built.nbytes > 110 * 100
    more = builder.build("e", [*documents, tokenizer.encode(document(50, 5))])
    assert (more.documents, more.tokens, more.found) == (3, 160, 2)
    assert more.nbytes > built.nbytes
    again = builder.build("d", documents)
    assert (again.found, again.seconds, again.nbytes) == (2, 0.0, built.nbytes)
