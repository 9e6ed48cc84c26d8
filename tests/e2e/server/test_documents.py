"""Documents come and go while the server runs; broken ones make a request dense, and no other."""

from __future__ import annotations

import time
from typing import Any

import pytest

from redknot.model.profile import SHIPPED
from tests.e2e.server.conftest import World
from tests.kit.requests import BOS, document, publish
from tests.kit.server import Server, answer_of, differs

OFF = {"reuse": "off"}
TEXT = "A brand new document about a fox that carries a lantern through the garden. " * 20


def add(main: Server, name: str, text: str) -> dict[str, Any]:
    """Build a document, and wait until it is there."""
    started: dict[str, Any] = main.post("/redknot/documents", {"documents": [{"name": name, "text": text}]})
    assert started["state"] in ("queued", "running")
    deadline = time.monotonic() + 90
    while (found := main.get(f"/redknot/builds/{started['build']}"))["state"] in ("queued", "running"):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    assert found["state"] == "done", found
    assert found["built"] == 1
    [row] = [row for row in main.get("/redknot/documents")["documents"] if name in row["names"]]
    return dict(row)


def published(world: World, seed: int, length: int = 200) -> tuple[list[int], str]:
    """A document that nobody has asked for yet, in the server's store: its ids and artifact."""
    ids = document(length, seed)
    [certificate] = publish(world.checkpoint, world.store, [ids], [SHIPPED["rowsparse"]])
    return ids, certificate.artifact_id


def test_health_says_whether_reuse_is_on(main: Server, world: World):
    state = main.health()
    assert state["reuse"] == "on"
    assert state["profile"] == "rowsparse"
    assert state["store"] == str(world.store)
    assert state["books"] == "balanced"
    assert main.call("GET", "/health").status_code == 200


def test_documents_are_listed_and_shown(main: Server, world: World):
    rows = main.get("/redknot/documents")["documents"]
    assert len(rows) >= len(world.documents)
    for row in rows[:3]:
        shown = main.get(f"/redknot/documents/{row['artifact_id']}")
        assert shown == row | {"faults": []}
    for unknown in ("0" * 64, "x", "..%2f..%2fetc", "a" * 500):
        assert main.call("GET", f"/redknot/documents/{unknown}").status_code == 404
        assert main.call("DELETE", f"/redknot/documents/{unknown}").status_code == 404
    assert main.call("GET", "/redknot/builds/none").status_code == 404


def test_a_document_is_added_used_and_deleted(main: Server, world: World):
    before = main.generate(f"Hello.\n{TEXT} So?", 4)
    assert before.report["arm"] == "dense"
    main.flush()  # an exact prefix of all of it would be better than reuse
    row = add(main, "fox", TEXT)
    prompt = f"Hello again.\n{TEXT} So?"
    after = main.generate(prompt, 4)
    assert after.report["arm"] == "reuse"
    assert after.report["documents"][0]["artifact_id"] == row["artifact_id"]
    gone = main.call("DELETE", f"/redknot/documents/{row['artifact_id']}")
    assert gone.status_code == 200, gone.text
    assert gone.json()["bytes"] == row["bytes"]
    assert main.call("DELETE", f"/redknot/documents/{row['artifact_id']}").status_code == 404
    last = main.generate(prompt, 4)
    assert (last.report["arm"], last.report["reason"]) == ("dense", "nothing_to_reuse")
    ids = [BOS, *world.engine().tokenizer.encode(prompt).tolist()]
    assert world.reference.wrong(ids, last.ids) == []


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"documents": []},
        {"documents": [{"name": "", "text": "x"}]},
        {"documents": [{"name": "a", "text": ""}]},
        {"documents": [{"name": "a"}]},
        {"documents": [{"name": "a", "text": "x", "namespace": "b"}]},
        {"documents": [{"name": "a", "text": "x"}, {"name": "a", "text": "y"}]},
        {"documents": "x"},
    ],
    ids=str,
)
def test_malformed_builds_are_refused(main: Server, body: dict[str, Any]):
    assert main.call("POST", "/redknot/documents", json=body).status_code in (400, 422)


def test_a_build_that_fails_says_why(main: Server):
    """sglang#8096: longer than the context at build."""
    started = main.post("/redknot/documents", {"documents": [{"name": "long", "text": "far too long " * 40000}]})
    deadline = time.monotonic() + 90
    while (found := main.get(f"/redknot/builds/{started['build']}"))["state"] in ("queued", "running"):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    assert found["state"] == "failed"
    assert found["built"] == 0
    assert "65536" in found["error"], found


def test_a_running_request_outlives_its_document(main: Server, world: World):
    part, artifact = published(world, 1000)
    ids = [BOS, *document(5, 1001), *part, *document(20, 1002)]
    alone = world.engine().generate(token_ids=ids, max_new_tokens=80, stop_at_eos=False)
    assert alone.report.reused_tokens > 0
    last: Any = None
    for place, event in enumerate(main.stream("/generate", main.body(ids, 80))):
        if place == 0:
            assert main.call("DELETE", f"/redknot/documents/{artifact}").status_code == 200
            missed = main.generate([*ids, 9], 4)
            assert missed.report["arm"] == "dense"
            assert missed.cached == 0
        last = event
    answer = answer_of(last)
    assert len(answer.ids) == 80
    assert not differs(answer.ids, answer.margins, alone.token_ids)


def test_a_corrupt_section_makes_its_requests_dense(main: Server, world: World):
    part, artifact = published(world, 1010)
    good, _ = published(world, 1011)
    ids = [BOS, *document(5, 1012), *part, *document(20, 1013)]
    spoil(world, artifact)
    required = main.call("POST", "/generate", json=main.body(ids, 4, {"reuse": "required"}))
    assert required.status_code in (400, 500), required.text  # while it was read: admitted, and then not there
    assert "corrupt_section" in required.text
    answer = main.generate(ids, 4)
    assert answer.report["arm"] == "dense"
    assert answer.report["reason"] in ("corrupt_section", "nothing_to_reuse")
    assert world.reference.wrong(ids, answer.ids) == []
    assert main.get(f"/redknot/documents/{artifact}")["faults"] != []
    other = main.generate([BOS, *document(5, 1012), *good, *document(20, 1013)], 4)
    assert other.report["arm"] == "reuse"


@pytest.mark.parametrize("fault", ["flipped", "cut", "missing"])
def test_a_broken_file_makes_its_requests_dense_and_is_named(main: Server, world: World, fault: str):
    """LMCache#2442, #3292, dynamo#15079: reported, logged with file and reason, and later requests are unaffected."""
    part, artifact = published(world, 1020 + ["flipped", "cut", "missing"].index(fault))
    ids = [BOS, *document(5, 1025), *part, *document(20, 1026)]
    spoil(world, artifact, fault)
    answer = main.generate(ids, 4)
    assert (answer.report["arm"], answer.report["reason"]) == ("dense", "corrupt_section")
    assert answer.report["reused_tokens"] == 0
    assert artifact[:12] in answer.report["detail"]
    assert world.reference.wrong(ids, answer.ids) == []
    lines = [line for line in main.log.read_text(encoding="utf-8").splitlines() if artifact[:12] in line]
    assert any("latents." in line and ".safetensors" in line for line in lines), lines
    for _ in range(2):
        later = main.generate(ids, 4)
        assert later.report["arm"] == "dense"
        assert world.reference.wrong(ids, later.ids) == []


def test_a_failure_inside_fails_its_request_alone(main: Server, world: World):
    """A section that turns out broken when its request requires reuse: an error in the middle of a batch."""
    part, artifact = published(world, 1030)
    spoil(world, artifact)
    bad = main.body([BOS, *document(5, 1031), *part, *document(20, 1032)], 30, {"reuse": "required"})
    good = [[BOS, *document(40 + number, 1033)] for number in range(4)]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(main.generate, ids, 30, OFF) for ids in good]
        failed = pool.submit(main.call, "POST", "/generate", json=bad).result()
        answers = [one.result() for one in others]
    assert failed.status_code == 500, failed.text
    assert "ReuseUnavailableError" in failed.text
    assert "corrupt_section" in failed.text
    for ids, answer in zip(good, answers, strict=True):
        assert world.reference.wrong(ids, answer.ids) == []
    main.at_rest()


def spoil(world: World, artifact: str, fault: str = "flipped") -> None:
    """Break every file of latents of an artifact."""
    found = [path for path in world.store.rglob("latents.*.safetensors") if artifact in str(path)]
    assert found
    for path in found:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.unlink()
        if fault != "missing":
            path.write_bytes(content[:-100] if fault == "cut" else content)
