"""The routes below /redknot over a small store: who sees and may do what, and what a malformed body gets."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from redknot.artifact.store import ArtifactStore
from sglang_patches.documents import Documents
from sglang_patches.http import add_to
from sglang_patches.options import Options, ServerConfig
from tests.artifact import kit
from tests.kit.child import NANO

KEYS = {"key-a": "mine", "key-b": "other", "key-ü": "third"}
NAMESPACES = ("mine", "other", "all", "default")


class Manager:
    """As much of SGLang's tokenizer manager as health asks for."""

    states: ClassVar[list[dict[str, Any]]] = [{"redknot": {"reuse": True}, "other": 1}]

    async def get_internal_state(self) -> list[dict[str, Any]]:
        return self.states


@dataclass
class Served:
    """A server's routes, and the artifact of each namespace."""

    client: TestClient
    documents: Documents
    ids: dict[str, str]

    def ask(self, method: str, path: str, key: str | None = "key-a", **more: Any) -> Any:
        headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
        return self.client.request(method, f"/redknot{path}", headers=headers, **more)

    def listed(self, key: str | None = "key-a") -> list[str]:
        return [row["namespace"] for row in self.ask("GET", "/documents", key).json()["documents"]]


def serve(path: Path, **config: Any) -> Served:
    with ArtifactStore(path, create=True) as store:
        for number, namespace in enumerate(NAMESPACES):
            tokens = [*kit.TOKENS, number]
            kit.publish(store, kit.draft(namespace=namespace), kit.sections(rows=len(tokens)), tokens, [namespace])
        ids = {row.namespace: row.artifact_id for row in store.list()}
    options = Options(NANO, path, "rowsparse", ServerConfig(shared_namespace="all", **config), None)  # type: ignore[arg-type]
    documents = Documents(options, 1, Manager())
    documents.builds._command = [sys.executable, "-c", "print('{}')"]
    app = FastAPI()

    @app.get("/health")
    @app.get("/v1/models")
    def plain() -> dict[str, str]:
        return {}

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("in")
        await socket.close()

    add_to(app, options.config, documents)
    return Served(TestClient(app, raise_server_exceptions=True), documents, ids)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    found = serve(tmp_path / "store", api_keys=KEYS)
    yield found
    found.documents.builds.close()
    found.documents.store.close()


@pytest.fixture
def unkeyed(tmp_path: Path) -> Iterator[Served]:
    found = serve(tmp_path / "store")
    yield found
    found.documents.builds.close()
    found.documents.store.close()


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer key", "Bearer key-a ", "key-a", "Basic key-a"]
)
def test_without_a_known_key_nothing_is_served(served, header):
    headers = {} if header is None else {"Authorization": header}
    if header == "Bearer key-a ":  # a client's library strips it
        headers = {"Authorization": "Bearer key-a x"}
    for path in ("/redknot/documents", "/redknot/health", "/v1/models", "/nowhere"):
        answer = served.client.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["message"] == "no such API key"
    assert served.client.get("/health", headers=headers).status_code == 200


def test_known_keys_are_let_in(served):
    for key in KEYS:
        assert served.ask("GET", "/documents", key).status_code == 200


def test_a_socket_needs_a_key_too(served):
    with pytest.raises(WebSocketDisconnect), served.client.websocket_connect("/v1/realtime"):
        pass
    with served.client.websocket_connect("/v1/realtime", headers={"Authorization": "Bearer key-a"}) as socket:
        assert socket.receive_text() == "in"


def test_a_key_sees_its_own_and_the_shared_documents(served):
    assert served.listed("key-a") == ["mine", "all"]
    assert served.listed("key-b") == ["other", "all"]
    assert served.listed("key-ü") == ["all"]


def test_without_keys_the_default_namespace_is_everybodys(unkeyed):
    assert unkeyed.listed(None) == ["default", "all"]
    assert unkeyed.ask("GET", f"/documents/{unkeyed.ids['mine']}", None).status_code == 404
    assert unkeyed.ask("DELETE", f"/documents/{unkeyed.ids['default']}", None).status_code == 200


def test_one_document(served):
    found = served.ask("GET", f"/documents/{served.ids['mine']}").json()
    assert found["names"] == ["mine"]
    assert found["artifact_id"] == served.ids["mine"]
    assert (found["tokens"], found["tp_size"], found["faults"]) == (len(kit.TOKENS) + 1, 1, [])
    assert found["bytes"] > 0
    assert served.ask("GET", f"/documents/{served.ids['all']}").json()["namespace"] == "all"


@pytest.mark.parametrize("artifact_id", ["0" * 64, "x", "..%2F..", "a" * 5000, "%00", "ü"])
def test_what_is_not_there_is_not_found(served, artifact_id):
    for method in ("GET", "DELETE"):
        answer = served.ask(method, f"/documents/{artifact_id}")
        assert answer.status_code == 404
        assert len(answer.content) < 300


def test_a_foreign_document_looks_as_if_it_were_not_there(served):
    foreign, absent = served.ids["other"], "0" * 64
    for method in ("GET", "DELETE"):
        answers = [served.ask(method, f"/documents/{one}") for one in (foreign, absent)]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].text.replace(foreign, absent) == answers[1].text
    assert served.listed("key-b") == ["other", "all"]


def test_a_shared_document_cannot_be_deleted(served):
    answer = served.ask("DELETE", f"/documents/{served.ids['all']}")
    assert answer.status_code == 403
    assert "is shared" in answer.json()["detail"]
    assert served.listed() == ["mine", "all"]


def test_a_document_is_deleted_once(served):
    path = f"/documents/{served.ids['mine']}"
    answer = served.ask("DELETE", path)
    assert answer.status_code == 200
    assert answer.json()["bytes"] > 0
    assert [served.ask(method, path).status_code for method in ("DELETE", "GET")] == [404, 404]
    assert served.listed() == ["all"]


GOOD = {"name": "a", "text": "b"}


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        None,
        3,
        {"documents": []},
        {"documents": {}},
        {"documents": "a"},
        {"documents": [GOOD], "namespace": "other"},
        {"documents": [{"name": "a"}]},
        {"documents": [GOOD | {"namespace": "other"}]},
        {"documents": [{"name": "", "text": "b"}]},
        {"documents": [{"name": "a", "text": ""}]},
        {"documents": [{"name": 1, "text": "b"}]},
        {"documents": [{"name": "a" * 513, "text": "b"}]},
        {"documents": [GOOD] * 1025},
    ],
)
def test_malformed_bodies(served, body):
    answer = served.ask("POST", "/documents", json=body)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("body")
    assert len(answer.content) < 300


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 10_000, b'{"documents": ["\\ud800"]}'])
def test_bodies_that_are_not_json(served, content):
    answer = served.ask("POST", "/documents", content=content)
    assert answer.status_code in (400, 422)
    assert isinstance(answer.json()["detail"], str)
    assert len(answer.content) < 300


def test_two_documents_of_one_name(served):
    answer = served.ask("POST", "/documents", json={"documents": [GOOD, GOOD]})
    assert (answer.status_code, answer.json()["detail"]) == (400, "two documents of the build have one name")


def test_a_build_is_its_namespaces_own(served):
    answer = served.ask("POST", "/documents", json={"documents": [GOOD]})
    assert answer.status_code == 202
    path = f"/builds/{answer.json()['build']}"
    assert served.ask("GET", path, "key-b").status_code == 404
    assert served.ask("GET", "/builds/0").status_code == 404
    limit = time.monotonic() + 60
    while (told := served.ask("GET", path).json())["state"] != "done":
        assert time.monotonic() < limit, told
        time.sleep(0.02)
    assert (told["documents"], told["built"], told["error"]) == (1, 0, None)


def test_health(served, monkeypatch):
    found = served.ask("GET", "/health").json()
    assert found == {"profile": "rowsparse", "store": str(served.documents.options.store), "reuse": True}
    monkeypatch.setattr(Manager, "states", [])
    assert set(served.ask("GET", "/health").json()) == {"profile", "store"}


def test_a_store_that_cannot_be_written_is_a_conflict(served, monkeypatch):
    from redknot.errors import StoreError

    def fail(*_: object) -> int:
        raise StoreError("the store is read-only")

    monkeypatch.setattr(served.documents.store, "remove", fail)
    answer = served.ask("DELETE", f"/documents/{served.ids['mine']}")
    assert (answer.status_code, answer.json()["detail"]) == (409, "the store is read-only")
