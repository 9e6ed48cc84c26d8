"""Every document and request reason, provoked: the dense answer, and the reason in report, log and metrics."""

from __future__ import annotations

import gc
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from redknot.artifact.certificate import CertificateDraft
from redknot.artifact.identity import token_array, token_hash
from redknot.artifact.publish import Publication
from redknot.artifact.schema import generation_dir
from redknot.artifact.store import ArtifactStore
from redknot.build.target import make_target
from redknot.comm.shard import Shard
from redknot.errors import ConfigError, DocumentReason, RequestReason, ReuseUnavailableError
from redknot.model.profile import SHIPPED, Profile, Protected, Selector, Treatment
from redknot.plan.planner import Span
from redknot.runtime.engine import Engine, Result
from redknot.runtime.progress import Request
from tests.artifact.kit import TOKEN_DAMAGE, alter_tokens, flip, offset_of
from tests.kit.requests import BOS, document, publish
from tests.runtime.conftest import Served
from tests.runtime.test_metrics import samples

QUESTION = document(20, 7)
NEW = 4  # generated tokens compared
SERVED = {DocumentReason.EXACT_PREFIX, RequestReason.SECTION_LATE}  # of a server alone: tests/serving provokes them
PROVOKED: set[object] = set()
RAN: set[str] = set()  # tests of this file that this process ran


@pytest.fixture(scope="module", autouse=True)
def every_reason_is_provoked(request: pytest.FixtureRequest):
    """A reason that no test of a whole run of this file provokes has no way to be seen."""
    PROVOKED.clear()
    RAN.clear()
    yield
    # Every worker of pytest-xdist collects the file and runs a part of it: only who ran all of it can say.
    here = {item.nodeid for item in request.session.items if item.path == request.path}
    if len(here) >= 25 and here <= RAN and not request.session.testsfailed:
        assert {*DocumentReason, *RequestReason} - SERVED == PROVOKED


@pytest.fixture(autouse=True)
def remember(request: pytest.FixtureRequest) -> None:
    RAN.add(request.node.nodeid)


@pytest.fixture
def dense(served: Served) -> Callable[..., Result]:
    """What a server that never reused answers."""
    server = Engine(served.checkpoint)
    return lambda **request: server.generate(**request, reuse="off", max_new_tokens=NEW)


@pytest.fixture
def own(served: Served, tmp_path: Path) -> tuple[Path, list]:
    """A store of two documents that a test may damage, and their certificates."""
    store = tmp_path / "store"
    return store, publish(served.checkpoint, store, served.documents[:2])


def metric(engine: Engine, name: str, **labels: str) -> float:
    return engine.metrics.registry.get_sample_value(name, labels) or 0.0


def request_of(served: Served) -> dict[str, list]:
    return {"segments": [*served.documents[:2], QUESTION]}


def expect_dense(
    engine: Engine,
    reason: RequestReason,
    request: dict,
    dense: Callable[..., Result],
    caplog: pytest.LogCaptureFixture,
    *details: str,
) -> Result:
    """One request runs dense for this reason, with the dense answer, and says so everywhere."""
    before = metric(engine, "redknot_fallbacks_total", reason=reason)
    with caplog.at_level(logging.INFO, "redknot"):
        caplog.clear()
        result = engine.generate(**request, max_new_tokens=NEW)
    report = result.report
    assert (report.arm, report.reason) == ("dense", reason), report.detail
    assert result.token_ids == dense(**request).token_ids
    assert report.reused_tokens == 0
    assert all(found.reused == 0 and found.recomputed == found.length for found in report.documents)
    assert report.ledgers.token_rows.saved == report.ledgers.head_rows.saved == 0
    assert report.bounds is report.to_dict()["bounds"] is None
    for detail in details:
        assert detail in report.detail
    assert "\n" not in report.detail
    assert f"dense: {reason} ({report.detail})" in caplog.messages
    assert metric(engine, "redknot_fallbacks_total", reason=reason) == before + 1
    assert json.loads(json.dumps(report.to_dict()))["reason"] == reason
    PROVOKED.add(reason)
    return result


def expect_reuse(engine: Engine, request: dict) -> Result:
    result = engine.generate(**request, max_new_tokens=NEW)
    assert (result.report.arm, result.report.reason) == ("reuse", None), result.report.detail
    assert result.report.reused_tokens > 0
    return result


# Request reasons


def test_reuse_off(served, dense, caplog):
    request = request_of(served) | {"reuse": "off"}
    server = served.engine()
    result = server.generate(**request, max_new_tokens=NEW)
    assert result.report.reason is RequestReason.REUSE_OFF
    assert result.token_ids == dense(**request_of(served)).token_ids
    # A profile that reuses nothing says the same.
    engine = Engine(served.checkpoint, served.store, "recompute")
    expect_dense(engine, RequestReason.REUSE_OFF, request_of(served), dense, caplog, "recompute")


def test_nothing_to_reuse(served, dense, caplog):
    request = {"segments": [document(100, 50), QUESTION]}
    result = expect_dense(served.engine(), RequestReason.NOTHING_TO_REUSE, request, dense, caplog)
    assert [found.reason for found in result.report.documents] == [DocumentReason.NO_MATCH]


def test_a_profile_that_runs_every_row_again_reuses_nothing(served, dense, caplog):
    profile = SHIPPED["rowsparse"].model_copy(update={"name": "all", "budget": 1.0})
    engine = Engine(served.checkpoint, served.store, profile)
    expect_dense(engine, RequestReason.NOTHING_TO_REUSE, request_of(served), dense, caplog, "runs every row")


def test_missing_layer(served, own, dense, caplog):
    """A certificate that lacks a section it should have."""
    store, certificates = own
    with ArtifactStore(store) as opened:
        loaded = opened.load(certificates[0].artifact_id, "default")
        sections = {name: loaded.section(name).clone() for name in certificates[0].sections}
        del sections["layers.2.entries"]
        draft = CertificateDraft("default", certificates[0].model, certificates[0].needs, 1)
        opened.publish_many([Publication(draft, sections, served.documents[0])])
    engine = Engine(served.checkpoint, store)
    expect_dense(engine, RequestReason.MISSING_LAYER, request_of(served), dense, caplog, "layers.2.entries")
    assert metric(engine, "redknot_certificates_refused_total", reason="missing_layer") == 1
    expect_reuse(engine, {"segments": [served.documents[1], QUESTION]})


@pytest.mark.parametrize("section", ["layers.0.window", "layers.2.index_keys", "layers.3.entries", "boundary.streams"])
def test_corrupt_section(served, own, dense, caplog, section):
    store, certificates = own
    record = certificates[0].sections[section]
    path = generation_dir(store, certificates[0].artifact_id, 1) / record.file
    flip(path, offset_of(path, section))
    engine = Engine(served.checkpoint, store)
    expect_dense(engine, RequestReason.CORRUPT_SECTION, request_of(served), dense, caplog, section, "quarantined")
    assert metric(engine, "redknot_certificates_refused_total", reason="corrupt_section") == 1
    # Quarantined: from now on the document is new text and the other one is reused.
    result = expect_reuse(engine, request_of(served))
    assert [found.reason for found in result.report.documents] == [DocumentReason.NO_MATCH, None]


def test_a_missing_file_is_incomplete_not_zeros(served, own, dense, caplog):
    store, certificates = own
    (generation_dir(store, certificates[1].artifact_id, 1) / "boundary.safetensors").unlink()
    expect_dense(Engine(served.checkpoint, store), RequestReason.CORRUPT_SECTION, request_of(served), dense, caplog)


def test_damage_after_the_first_request_is_seen(served, own, dense, caplog):
    store, certificates = own
    engine = Engine(served.checkpoint, store)
    expect_reuse(engine, request_of(served))
    path = generation_dir(store, certificates[0].artifact_id, 1) / certificates[0].sections["layers.2.entries"].file
    with open(path, "r+b") as handle:
        handle.truncate(path.stat().st_size // 2)
    expect_dense(engine, RequestReason.CORRUPT_SECTION, request_of(served), dense, caplog)


def test_token_mismatch(served, own, dense, caplog):
    """The catalogue says other tokens than the certificate, consistently: nobody may rely on them."""
    store, certificates = own
    other = served.documents[2] + document(32, 3)
    alter_tokens(store, certificates[0].artifact_id, lambda ids: token_array(other).tobytes())
    with ArtifactStore(store) as opened, opened.catalogue.write() as connection:
        claim = (token_hash(other), len(other), certificates[0].artifact_id)
        connection.execute("UPDATE artifacts SET token_hash = ?, token_count = ? WHERE artifact_id = ?", claim)
    request = {"segments": [other, QUESTION]}
    expect_dense(Engine(served.checkpoint, store), RequestReason.TOKEN_MISMATCH, request, dense, caplog)


@pytest.mark.parametrize("damage", TOKEN_DAMAGE)
def test_damaged_token_ids_take_one_document_out(served, own, caplog, damage):
    """Not a reason for the request: the document is new text, the other one is reused, and a build repairs it."""
    store, certificates = own
    alter_tokens(store, certificates[0].artifact_id, TOKEN_DAMAGE[damage])
    engine = Engine(served.checkpoint, store)
    with caplog.at_level(logging.ERROR, "redknot"):
        result = expect_reuse(engine, request_of(served))
    assert [found.reason for found in result.report.documents] == [DocumentReason.NO_MATCH, None]
    [line] = caplog.messages
    assert line.startswith(f"artifact {certificates[0].artifact_id[:12]} generation 1: tokens in catalogue.sqlite: ")
    assert line.endswith("; quarantined")
    assert samples(engine.metrics)["redknot_documents_total{outcome=no_match}"] == 1
    assert engine.library is not None
    assert engine.library.store.counters["corrupt_sections"] == 1
    sound = served.engine().generate(segments=[document(96, 5), *request_of(served)["segments"][1:]], max_new_tokens=1)
    assert sound.report.reused_tokens == result.report.reused_tokens
    caplog.clear()
    publish(served.checkpoint, store, served.documents[:1])
    again = expect_reuse(engine, request_of(served))
    assert [found.reason for found in again.report.documents] == [None, None]
    assert caplog.messages == []


def test_token_ids_damaged_while_serving(served, own):
    """An engine goes on with the ids it has checked; one that starts now leaves the document out."""
    store, certificates = own
    engine = Engine(served.checkpoint, store)
    expect_reuse(engine, request_of(served))
    alter_tokens(store, certificates[0].artifact_id, TOKEN_DAMAGE["one id"])
    publish(served.checkpoint, store, served.documents[2:3])
    for serving, first in ((engine, None), (Engine(served.checkpoint, store), DocumentReason.NO_MATCH)):
        result = expect_reuse(serving, request_of(served))
        assert [found.reason for found in result.report.documents] == [first, None]


def test_every_document_damaged(served, own, dense, caplog):
    store, certificates = own
    for certificate in certificates:
        alter_tokens(store, certificate.artifact_id, TOKEN_DAMAGE["one id"])
    engine = Engine(served.checkpoint, store)
    for _ in range(2):
        expect_dense(engine, RequestReason.NOTHING_TO_REUSE, request_of(served), dense, caplog)


def test_profile_mismatch(served, tmp_path, dense, caplog):
    """The catalogue promises more than the artifact was built for; the certificate decides."""
    store = tmp_path / "store"
    publish(served.checkpoint, store, served.documents[:2], [SHIPPED["turbo"]])
    with ArtifactStore(store) as opened, opened.catalogue.write() as connection:
        needs = json.dumps(SHIPPED["rowsparse"].needs())
        connection.execute("UPDATE artifacts SET needs = ?", (needs,))
    engine = Engine(served.checkpoint, store)
    expect_dense(engine, RequestReason.PROFILE_MISMATCH, request_of(served), dense, caplog, "streams:1", "window_all")


def altered(served: Served, tmp_path: Path, **changes: object) -> Path:
    folder = tmp_path / "altered"
    shutil.copytree(served.checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        assert config[key] != value
        config[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rms_norm_eps": 1e-5}, "geometry.norm_eps"),
        ({"index_topk": 17}, "geometry.index_topk"),
        ({"swiglu_limit": 9.0}, "geometry.swiglu_limit"),
        ({"sliding_window": 16}, "geometry.window"),
        ({"max_position_embeddings": 2000}, "geometry.max_positions"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_geometry_mismatch(served, tmp_path, caplog, changes, named):
    folder = altered(served, tmp_path, **changes)
    server = Engine(folder)
    engine = Engine(folder, served.store)
    expect_dense(
        engine,
        RequestReason.GEOMETRY_MISMATCH,
        request_of(served),
        lambda **request: server.generate(**request, reuse="off", max_new_tokens=NEW),
        caplog,
        named,
    )


def test_rope_theta_is_geometry(served, tmp_path):
    parameters = json.loads((served.checkpoint / "config.json").read_text())["rope_parameters"]
    parameters["compress"]["rope_theta"] = 170000.0
    result = Engine(altered(served, tmp_path, rope_parameters=parameters), served.store).generate(
        **request_of(served), max_new_tokens=1
    )
    assert result.report.reason is RequestReason.GEOMETRY_MISMATCH
    assert "geometry.rope_compress.theta" in result.report.detail


def test_geometry_mismatch_of_shards(served, tmp_path, dense, caplog):
    """Built for two ranks, served by one: refused with both layouts, but only where shards are read."""
    store = tmp_path / "store"
    publish(served.checkpoint, store, served.documents[:2], tp_size=2)
    engine = Engine(served.checkpoint, store, "combined")
    expect_dense(engine, RequestReason.GEOMETRY_MISMATCH, request_of(served), dense, caplog, "TP size 2", "TP size 1")
    expect_reuse(Engine(served.checkpoint, store, "rowsparse"), request_of(served))


def test_identity_mismatch_of_one_weight_byte(served, tmp_path, caplog):
    folder = altered(served, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.1.attn.wkv.weight"].view(torch.uint8).view(-1)[0] ^= 1
    save_file(tensors, folder / "model.safetensors")
    server, engine = Engine(folder), Engine(folder, served.store)

    def answer(**request: list) -> Result:
        return server.generate(**request, reuse="off", max_new_tokens=NEW)

    expect_dense(engine, RequestReason.IDENTITY_MISMATCH, request_of(served), answer, caplog, "weights_hash")


def test_identity_mismatch_of_the_tokenizer(served, tmp_path, dense, caplog):
    folder = altered(served, tmp_path)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    engine = Engine(folder, served.store)
    expect_dense(engine, RequestReason.IDENTITY_MISMATCH, request_of(served), dense, caplog, "tokenizer_hash")


def test_stale_generation(served, own, dense, caplog, monkeypatch):
    """Replaced between the look at the catalogue and the load: dense once, the new one next time."""
    store, _ = own
    engine = Engine(served.checkpoint, store)
    expect_reuse(engine, request_of(served))
    publish(served.checkpoint, store, served.documents[:1])
    library = engine.library
    assert library is not None
    with monkeypatch.context() as patch:
        patch.setattr(library, "refresh", lambda: None)
        expect_dense(engine, RequestReason.STALE_GENERATION, request_of(served), dense, caplog, "generation 2")
    expect_reuse(engine, request_of(served))


def test_a_rebuilt_document_is_reused_again(served, own):
    """An engine that holds the old generation takes the new one, with no dense request between."""
    store, _ = own
    engine = Engine(served.checkpoint, store)
    first = expect_reuse(engine, request_of(served))
    publish(served.checkpoint, store, served.documents[:1])
    assert expect_reuse(engine, request_of(served)).token_ids == first.token_ids


class Doubter:
    """A rank whose peer says no, or is about to read something else."""

    shard = Shard()

    def __init__(self, agree: bool, other: int = 0) -> None:
        self.agree, self.other, self.votes = agree, other, 0
        self.plans: list[int] = []  # what this rank said it would read

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.int64:
            return tensor
        self.plans.append(int(tensor))
        return tensor + self.other

    def all_agree(self, mine: bool) -> bool:
        self.votes += 1
        return mine and self.agree


@pytest.mark.parametrize("peer", [Doubter(False), Doubter(True, other=5)], ids=["votes no", "other plan"])
def test_rank_disagreement(served, dense, caplog, peer):
    engine = Engine(served.checkpoint, served.store, group=peer)
    expect_dense(engine, RequestReason.RANK_DISAGREEMENT, request_of(served), dense, caplog)
    assert peer.votes == 1
    engine.generate(**request_of(served), reuse="off", max_new_tokens=1)
    assert peer.votes == 1


def test_ranks_compare_certificates_not_generation_numbers(served, tmp_path):
    """Two stores that hold the same documents, each in generation 1, built apart: other bytes for all one knows."""
    plans = []
    for name in ("a", "a", "b"):
        if not (tmp_path / name).exists():
            publish(served.checkpoint, tmp_path / name, served.documents[:2])
        peer = Doubter(True)
        expect_reuse(Engine(served.checkpoint, tmp_path / name, group=peer), request_of(served))
        plans += peer.plans
    assert plans[0] == plans[1] != plans[2]


def test_a_rank_that_cannot_certify_still_votes(served, tmp_path):
    peer = Doubter(True)
    engine = Engine(served.checkpoint, tmp_path / "nothing", group=peer)
    assert engine.generate(**request_of(served), max_new_tokens=1).report.reason is RequestReason.STORE_UNAVAILABLE
    assert peer.votes == 1


def not_there(store: Path) -> None:
    pass


def no_catalogue(store: Path) -> None:
    store.mkdir()


def garbage(store: Path) -> None:
    store.mkdir()
    (store / "catalogue.sqlite").write_bytes(b"no database at all" * 100)


def other_database(store: Path) -> None:
    import sqlite3

    store.mkdir()
    with sqlite3.connect(store / "catalogue.sqlite") as connection:
        connection.execute("CREATE TABLE x (y)")


@pytest.mark.parametrize("prepare", [not_there, no_catalogue, garbage, other_database])
def test_store_unavailable(served, tmp_path, dense, caplog, prepare):
    prepare(tmp_path / "store")
    engine = Engine(served.checkpoint, tmp_path / "store")
    for _ in range(2):
        expect_dense(engine, RequestReason.STORE_UNAVAILABLE, request_of(served), dense, caplog, "store")


def test_requests_without_a_store_leave_nothing_behind(served, tmp_path):
    """The reason outlives the request, the request does not: no exception with a growing traceback is kept."""

    def alive() -> int:
        gc.collect()
        return sum(type(found) is Request for found in gc.get_objects())

    engine, before = Engine(served.checkpoint, tmp_path / "nothing"), alive()
    for _ in range(3):
        engine.generate(**request_of(served), max_new_tokens=1)
    assert alive() == before


def test_no_store_given(served, dense, caplog):
    expect_dense(Engine(served.checkpoint), RequestReason.STORE_UNAVAILABLE, request_of(served), dense, caplog)


def test_a_store_that_breaks_while_serving(served, own, dense, caplog):
    store, _ = own
    engine = Engine(served.checkpoint, store)
    expect_reuse(engine, request_of(served))
    assert engine.library is not None
    engine.library.store.close()
    for file in store.glob("catalogue.sqlite*"):
        file.unlink()
    expect_dense(engine, RequestReason.STORE_UNAVAILABLE, request_of(served), dense, caplog, "catalogue")


@pytest.mark.parametrize(
    ("profile", "detail"),
    [
        (Profile(name="deep", fence_layers=3), "leave no middle for 3+3"),
        (Profile(name="wide", middle_active=Treatment.GLOBAL_Z, global_heads=(8,)), "Global head 8 in groups of 8"),
        (
            Profile(name="far", selector=Selector.DEVIATION, deviation_layer=5),
            "deviation_layer 5, but its layers are 0 to 4",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Profile) else "",
)
def test_unsupported_model(served, dense, caplog, profile, detail):
    engine = Engine(served.checkpoint, served.store, profile)
    expect_dense(engine, RequestReason.UNSUPPORTED_MODEL, request_of(served), dense, caplog, detail)


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        ({"middle_active": "global+z", "middle_idle": "global+z"}, "selector indexer needs middle_idle skip"),
        ({"middle_idle": "full", "budget": 0, "fence_idle": "skip"}, "fence_idle skip needs middle_idle skip"),
        ({"selector": "deviation", "deviation_layer": -1}, "deviation_layer: Input should be greater than or equal"),
    ],
    ids=["blind", "late", "negative"],
)
def test_what_no_model_could_run_is_no_profile(served, tmp_path, content, detail):
    """Said in one line when the engine starts, not with every request."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"name": "p", **content}))
    with pytest.raises(ConfigError, match=detail) as error:
        Engine(served.checkpoint, served.store, str(path))
    assert str(error.value).startswith(f"profile {path}: ")
    assert "\n" not in str(error.value)


# Document reasons


def expect_documents(engine: Engine, request: dict, reasons: list, caplog: pytest.LogCaptureFixture) -> Result:
    """These documents' reasons, in order, in report, log and metrics; reused and recomputed rows add up.

    The answer is that of the same ids in which the client points out the reusable documents only.
    """
    before = {reason: metric(engine, "redknot_documents_total", outcome=reason or "reused") for reason in set(reasons)}
    with caplog.at_level(logging.INFO, "redknot"):
        caplog.clear()
        result = engine.generate(**request, max_new_tokens=NEW)
    documents = result.report.documents
    assert [found.reason for found in documents] == reasons
    for found in documents:
        assert found.reused + found.recomputed == found.length
        assert (found.reused > 0) == (found.reason is None)
        if found.reason is not None:
            assert f"document at token {found.start} is new text: {found.reason}" in caplog.messages
    for reason, count in before.items():
        now = metric(engine, "redknot_documents_total", outcome=reason or "reused")
        assert now == count + reasons.count(reason)
    ids = request.get("token_ids") or [BOS, *(token for part in request["segments"] for token in part)]
    spans = [(found.start, found.start + found.length) for found in documents if found.reason is None]
    plain = engine.generate(token_ids=ids, spans=spans, max_new_tokens=NEW)
    assert all(found.reason is None for found in plain.report.documents)
    assert plain.token_ids == result.token_ids
    assert plain.report.counters == result.report.counters
    PROVOKED.update(reason for reason in reasons if reason is not None)
    return result


def test_too_short_and_no_match(served, caplog):
    segments = [served.documents[0], document(31, 60), document(40, 61), served.documents[1], QUESTION]
    reasons = [None, DocumentReason.TOO_SHORT, DocumentReason.NO_MATCH, None]
    expect_documents(served.engine(), {"segments": segments}, reasons, caplog)


def test_not_built(served, tmp_path, caplog):
    """Its artifact serves another profile."""
    store = tmp_path / "store"
    publish(served.checkpoint, store, served.documents[:1], [SHIPPED["turbo"]])
    publish(served.checkpoint, store, served.documents[1:2], [SHIPPED["rowsparse"]])
    engine = Engine(served.checkpoint, store)
    expect_documents(engine, request_of(served), [DocumentReason.NOT_BUILT, None], caplog)


def test_not_built_in_part(served, tmp_path, caplog):
    """turbo's own artifacts keep the last window only, so a part of a document that stops early cannot be reused."""
    store = tmp_path / "store"
    publish(served.checkpoint, store, served.documents, [SHIPPED["turbo"]])
    engine = Engine(served.checkpoint, store, "turbo")
    segments = [served.documents[4][:128], served.documents[4][128:], served.documents[0], QUESTION]
    expect_documents(engine, {"segments": segments}, [DocumentReason.NOT_BUILT, None, None], caplog)
    # An artifact that serves other profiles too keeps them all.
    expect_documents(served.engine("turbo"), {"segments": segments}, [None, None, None], caplog)


def test_not_worth_it(served, caplog):
    """First and last window cover the whole document."""
    segments = [served.documents[2], served.documents[0], QUESTION]
    expect_documents(served.engine(), {"segments": segments}, [DocumentReason.NOT_WORTH_IT, None], caplog)


def test_not_worth_it_counts_the_recent_tail(served, caplog):
    profile = Profile(name="tail", protected=Protected(recent_tail=200))
    engine = Engine(served.checkpoint, served.store, profile)
    segments = [served.documents[4], served.documents[0], served.documents[3], QUESTION]
    reasons = [None, DocumentReason.NOT_WORTH_IT, DocumentReason.NOT_WORTH_IT]
    expect_documents(engine, {"segments": segments}, reasons, caplog)


def test_not_worth_it_counts_the_probe(served, caplog):
    """32 of its rows could be skipped in 4 layers; ranking them runs the question's 32 rows in all 5."""
    segments = [served.documents[0], document(40, 7)]
    expect_documents(served.engine(), {"segments": segments}, [DocumentReason.NOT_WORTH_IT], caplog)
    expect_documents(served.engine("turbo"), {"segments": segments}, [None], caplog)
    expect_documents(served.engine(), {"segments": [*served.documents[:2], document(40, 7)]}, [None, None], caplog)


def test_other_namespace(served, tmp_path, caplog):
    """Naming an artifact that is not one's own: the same answer whether or not somebody else has it."""
    store = tmp_path / "store"
    mine = publish(served.checkpoint, store, served.documents[:2], namespace="a")
    theirs = publish(served.checkpoint, store, served.documents[4:5], namespace="b")
    engine = Engine(served.checkpoint, store, namespace="a")
    parts = [[BOS], served.documents[4], served.documents[1], QUESTION]
    ids = [token for part in parts for token in part]
    edge, end = 1 + 257, 1 + 257 + 130
    other, own = Span(1, edge, theirs[0].artifact_id), Span(edge, end, mine[1].artifact_id)
    seen = []
    for name in (other.artifact_id, "0" * 64, "no id at all"):
        request = {"token_ids": ids, "spans": [Span(1, edge, name), own]}
        result = expect_documents(engine, request, [DocumentReason.OTHER_NAMESPACE, None], caplog)
        seen.append((result.token_ids, result.report.counters))
    assert seen[0] == seen[1] == seen[2]
    # Without naming it, the tenant's request is plainly one with an unknown document.
    expect_documents(engine, {"token_ids": ids, "spans": [(1, edge), own]}, [DocumentReason.NO_MATCH, None], caplog)
    # Whose it is reuses it, named or not.
    owner = Engine(served.checkpoint, store, namespace="b")
    expect_documents(owner, {"token_ids": ids, "spans": [other, (edge, end)]}, [None, DocumentReason.NO_MATCH], caplog)
    # A document of one's own is not reused under somebody else's name.
    request = {"token_ids": ids, "spans": [(1, edge), Span(edge, end, theirs[0].artifact_id)]}
    result = engine.generate(**request, max_new_tokens=NEW)
    assert result.report.reason is RequestReason.NOTHING_TO_REUSE
    assert result.report.documents[1].reason is DocumentReason.OTHER_NAMESPACE


# required


@pytest.mark.parametrize("found", [True, False])
def test_required_reuse(served, tmp_path, caplog, found):
    segments = [*served.documents[:2], QUESTION] if found else [document(50, 70), QUESTION]
    if found:
        assert served.engine().generate(segments=segments, reuse="required", max_new_tokens=1).report.arm == "reuse"
        engine, reason = Engine(served.checkpoint, tmp_path / "none"), RequestReason.STORE_UNAVAILABLE
    else:
        engine, reason = served.engine(), RequestReason.NOTHING_TO_REUSE
    before = samples(engine.metrics)
    with caplog.at_level(logging.INFO, "redknot"), pytest.raises(ReuseUnavailableError) as error:
        engine.generate(segments=segments, reuse="required")
    assert "\n" not in str(error.value)
    detail = str(error.value).removeprefix(f"reuse is required but not possible: {reason} ")
    assert detail != str(error.value)
    assert caplog.messages[-1] == f"refused: {reason} {detail}"
    # In the metrics it is a refused request with its reason, and no answered one.
    after = samples(engine.metrics)
    assert {name: after[name] - before[name] for name in before if after[name] != before[name]} == {
        f"redknot_requests_refused_total{{reason={reason}}}": 1
    }


def test_profiles_for_an_engine_without_picks(served):
    """A profile without skipped rows and without a selector probes nothing and is served."""
    profile = Profile(
        name="split",
        middle_active=Treatment.GLOBAL_Z,
        middle_idle=Treatment.GLOBAL_Z,
        selector=Selector.NONE,
        budget=0.0,
        protected=Protected(indexed_share=0.0),
    )
    assert make_target(served.model.geometry, [profile], 1, "n").needs == ("zl:1:0",)
    expect_reuse(Engine(served.checkpoint, served.store, profile), request_of(served))
