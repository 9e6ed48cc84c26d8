"""Profiles whose Global heads differ by layer and group: artifacts, reuse, and artifacts of another table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from redknot.artifact.store import ArtifactStore
from redknot.build.capture import evaluate
from redknot.build.target import make_target
from redknot.errors import ConfigError, DocumentReason, RequestReason
from redknot.model.heads import fixed_table
from redknot.model.profile import SHIPPED, Profile
from redknot.plan.rows import Rows
from redknot.runtime.counters import Counters
from redknot.runtime.engine import Engine
from redknot.runtime.prefill import prefill
from redknot.runtime.restore import Source, segmented_session
from redknot.runtime.reuse import prefill_reusing
from tests.kit.heads import mixed_table
from tests.kit.memory import nan_memory
from tests.kit.requests import Memory, assemble, known, new, publish
from tests.kit.rows import widest
from tests.runtime.conftest import Served


def with_table(name: str, served: Served, seed: int = 0) -> Profile:
    table = mixed_table(served.model.geometry, seed=seed)
    return SHIPPED[name].model_copy(update={"name": f"{name}-table", "head_table": table})


def test_what_is_restored_is_what_the_other_heads_would_have_done(served: Served) -> None:
    """A document in front of everything, all its rows restored: bfloat16 is all that it differs by."""
    model, documents = served.model, served.documents
    ids, runs = assemble([known(documents, 0), new(20)])
    session = segmented_session(nan_memory(model.geometry), runs, len(ids), 0)
    expected = prefill(model, [session], [ids], Counters())[0]
    query = torch.arange(len(ids)) >= len(documents[0])
    rows = Rows(len(ids), query, torch.zeros_like(query))

    def error(built: Profile, run: Profile) -> float:
        heads = built.heads(model.geometry)
        sections = evaluate(model, [torch.tensor(documents[0])], built.needs(), Counters(), heads=heads)[0]
        source = Source(runs[0], Memory(sections))
        session = segmented_session(nan_memory(model.geometry), runs, len(ids), 0)
        return widest(prefill_reusing(model, session, [source], rows, ids, run, Counters()), expected)

    one, other = with_table("headsplit", served), with_table("headsplit", served, seed=1)
    right = error(one, one)
    assert right < 0.1
    # Z_L of one table read as another's would show: that the reader names the table is not for nothing.
    assert error(other, one) > 10 * right


def test_an_artifact_of_another_table_is_a_mismatch(served: Served, tmp_path: Path) -> None:
    one, other = with_table("combined", served), with_table("combined", served, seed=1)
    store, segments = tmp_path / "store", [served.documents[0], served.documents[1], [9] * 20]
    request = [token for part in segments for token in part]
    publish(served.checkpoint, store, served.documents[:2], [one])
    found = Engine(served.checkpoint, store, one).generate(token_ids=request, max_new_tokens=2).report
    assert (found.arm, found.reason) == ("reuse", None)
    assert found.ledgers.head_rows.saved > 0
    for profile in (other, SHIPPED["combined"]):
        found = Engine(served.checkpoint, store, profile).generate(token_ids=request, max_new_tokens=2).report
        assert (found.arm, found.reason) == ("dense", RequestReason.NOTHING_TO_REUSE)
        assert {document.reason for document in found.documents} == {DocumentReason.NOT_BUILT}
    # And where the catalogue says that it serves the other table, the certificate does not.
    with ArtifactStore(store) as opened, opened.catalogue.write() as connection:
        connection.execute("UPDATE artifacts SET needs = ?", (json.dumps(other.needs()),))
    found = Engine(served.checkpoint, store, other).generate(token_ids=request, max_new_tokens=2).report
    assert (found.arm, found.reason) == ("dense", RequestReason.PROFILE_MISMATCH)


def test_a_table_that_is_the_fixed_choice_reads_its_artifacts(served: Served) -> None:
    table = fixed_table(served.model.geometry, (0,))
    same = SHIPPED["combined"].model_copy(update={"head_table": table})
    request = [*served.documents[0], *served.documents[1], *[9] * 20]
    answers = [
        Engine(served.checkpoint, served.store, profile).generate(token_ids=request, max_new_tokens=4)
        for profile in (same, SHIPPED["combined"])
    ]
    assert [answer.report.arm for answer in answers] == ["reuse", "reuse"]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].report.ledgers.head_rows == answers[1].report.ledgers.head_rows


def test_one_artifact_holds_one_table(served: Served) -> None:
    one, other = with_table("combined", served), with_table("headsplit", served, seed=1)
    geometry = served.model.geometry
    assert make_target(geometry, [SHIPPED["turbo"], one], 1, "n").heads == one.head_table
    with pytest.raises(ConfigError, match="one artifact cannot hold both zl:1:table-"):
        make_target(geometry, [one, other], 1, "n")
    with pytest.raises(ValueError, match="not the one given"):
        evaluate(served.model, [torch.tensor(served.documents[0])], one.needs(), Counters(), heads=other.head_table)
