"""API keys that stand for namespaces, and V4's own chat encoding: a server of a random checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from redknot.model.profile import SHIPPED
from redknot.model.tokenizer import load_tokenizer
from tests.kit.requests import BOS, ROOT, document, publish, use_cache, write_checkpoint
from tests.kit.server import Server, serving
from tests.kit.v4chat import add_control_tokens

OFF = {"reuse": "off"}
KEYS = {"key-of-a": "a", "key-of-b": "b", "key-of-nobody": "default"}


@dataclass(frozen=True)
class Tenants:
    server: Server
    a: Server
    b: Server
    nobody: Server  # of the namespace that requests without one have
    text: str  # a's document
    ids: list[int]
    artifact: str
    common: list[int]  # a shared document
    shared_artifact: str
    checkpoint: Path


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp("tenants")
    patch = use_cache(folder / "cache")
    checkpoint = write_checkpoint(folder / "model")
    add_control_tokens(checkpoint)
    text = (ROOT / "examples/corpus/document-00.txt").read_text(encoding="utf-8")
    ids, common = load_tokenizer(checkpoint).encode(text).tolist(), document(200, 3)
    profiles = [SHIPPED["rowsparse"]]
    [own] = publish(checkpoint, folder / "store", [ids], profiles, namespace="a")
    [shared] = publish(checkpoint, folder / "store", [common], profiles, namespace="public")
    config = folder / "redknot.json"
    config.write_text(json.dumps({"api_keys": KEYS, "shared_namespace": "public"}))
    options = ("--redknot-config", str(config), "--max-total-tokens", 8192)
    with serving(folder, folder / "store", *options, model=checkpoint, key="key-of-a") as server:
        a, b, nobody = (server.as_key(key) for key in KEYS)
        yield Tenants(server, a, b, nobody, text, ids, own.artifact_id, common, shared.artifact_id, checkpoint)
    patch.undo()


def prompt(tenants: Tenants, seed: int = 1) -> list[int]:
    return [BOS, *document(5, seed), *tenants.ids, *document(20, seed)]


@pytest.mark.parametrize("key", [None, "", "key-of-c", "key-of-", "KEY-OF-A"])
def test_nobody_gets_in_without_a_key(tenants: Tenants, key: str | None):
    stranger = tenants.server.as_key(key)
    for method, path in (
        ("POST", "/generate"),
        ("POST", "/v1/completions"),
        ("GET", "/redknot/documents"),
        ("GET", "/redknot/health"),
        ("DELETE", f"/redknot/documents/{tenants.artifact}"),
        ("POST", "/flush_cache"),
        ("GET", "/server_info"),
    ):
        response = stranger.call(method, path, json={"text": "Hello"})
        assert response.status_code == 401, path
        assert response.json()["error"]["message"]
    assert stranger.call("GET", "/health").status_code == 200


def test_another_tenant_gets_nothing_of_a_document(tenants: Tenants):
    """CVE-2025-46570: no reuse, no speed-up, no cached tokens, and no word about it."""
    tenants.a.flush()
    ids = prompt(tenants)
    first = tenants.a.generate(ids, 4)
    assert first.report["arm"] == "reuse"
    tenants.a.generate(ids, 4, OFF)
    unknown = tenants.b.generate([BOS, *document(537, 2)], 4)
    for one in (tenants.b, tenants.nobody):
        other = one.generate(ids, 4)
        assert other.cached == other.report["cached_tokens"] == 0
        assert other.report["forwarded_rows"] == len(ids)
        for name in ("arm", "reason", "detail", "documents", "reused_tokens", "certified"):
            assert other.report[name] == unknown.report[name], name
        assert "reuse is required" in one.refused("/generate", one.body(ids, 4, {"reuse": "required"}))
    again = tenants.a.generate(ids, 4)
    assert again.report["arm"] == "reuse"
    assert again.cached == (len(ids) - 1) // 32 * 32


def test_naming_a_document_of_another_tenant_says_no_more_than_naming_none(tenants: Tenants):
    ids = prompt(tenants, 4)
    reports = []
    for artifact in (tenants.artifact, "f" * 64):
        tenants.a.flush()
        span = {"start": 6, "end": 6 + len(tenants.ids), "artifact_id": artifact}
        report = tenants.b.generate(ids, 4, {"spans": [span]}).report
        assert report["arm"] == "dense"
        reports.append([{**one, "artifact_id": None} for one in report["documents"]])
        assert tenants.artifact not in report["detail"]
    assert reports[0] == reports[1]


def test_a_client_cannot_say_who_it_is(tenants: Tenants):
    """Neither in custom_params, nor by the keys of the prefix cache."""
    tenants.a.flush()
    ids = prompt(tenants, 5)
    reused = tenants.a.generate(ids, 4)
    assert reused.report["arm"] == "reuse"
    exact = tenants.a.generate(ids, 4, OFF)
    assert exact.cached == 0
    forged = {"custom_params": {"redknot_namespace": "a"}}
    for one in (tenants.b, tenants.nobody):
        for key in (None, "redknot-namespace:a", "redknot-namespace:b"):
            extra = {} if key is None else {"extra_key": key}
            found = one.generate(ids, 4, sampling=forged, **extra)
            assert found.report["arm"] == "dense"
            assert found.cached == found.report["cached_tokens"] == 0, (one.key, key)
            tenants.a.flush()
            tenants.a.generate(ids, 4, OFF)
        completion = {"model": one.model, "prompt": ids, "max_tokens": 2} | forged
        report = one.post("/v1/completions", completion)["metadata"]["redknot"][0]
        assert (report["arm"], report["cached_tokens"]) == ("dense", 0)
        tenants.a.flush()
        tenants.a.generate(ids, 4, OFF)


def test_equal_strings_in_other_fields_are_other_keys(tenants: Tenants):
    """sglang#37160, vllm#44701: salt, extra key and tenant, permuted."""
    ids = [BOS, *document(99, 6)]
    seen: list[Any] = []
    for one in (tenants.a, tenants.b):
        for salt, extra in ((None, None), ("x", None), (None, "x"), ("x", "x"), ("a", "b"), ("b", "a"), ("a", None)):
            more = {name: value for name, value in (("cache_salt", salt), ("extra_key", extra)) if value is not None}
            assert one.generate(ids, 2, OFF, **more).cached == 0, (one.key, salt, extra)
            assert one.generate(ids, 2, OFF, **more).cached == 96
            seen.append(more)
    assert len(seen) == 14


def test_shared_documents_are_everybodys_to_read(tenants: Tenants):
    ids = [BOS, *document(5, 7), *tenants.common, *document(20, 7)]
    for one in (tenants.a, tenants.b, tenants.nobody):
        found = one.generate(ids, 4)
        assert found.report["arm"] == "reuse"
        assert found.cached == 0  # pages are the tenant's own
        listed = {row["artifact_id"] for row in one.get("/redknot/documents")["documents"]}
        assert tenants.shared_artifact in listed
        assert (tenants.artifact in listed) == (one is tenants.a)
        assert one.call("DELETE", f"/redknot/documents/{tenants.shared_artifact}").status_code == 403
    for method in ("GET", "DELETE"):
        assert tenants.b.call(method, f"/redknot/documents/{tenants.artifact}").status_code == 404


def test_a_document_that_a_tenant_adds_is_its_own(tenants: Tenants):
    import time

    text = "A letter of tenant b about a boat and two oars on the lake. " * 12
    started = tenants.b.post("/redknot/documents", {"documents": [{"name": "letter", "text": text}]})
    build = f"/redknot/builds/{started['build']}"
    assert tenants.a.call("GET", build).status_code == 404
    deadline = time.monotonic() + 90
    while (found := tenants.b.get(build))["state"] in ("queued", "running"):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    assert found["state"] == "done", found
    assert tenants.b.generate(f"So.\n{text} Then?", 2).report["arm"] == "reuse"
    assert tenants.a.generate(f"So.\n{text} Then?", 2).report["arm"] == "dense"


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("shape", ["{}", "Read this.\n\n{}\n\nWhat is in the kitchen?", "x{}y", "{}\n", " {} "])
def test_documents_are_found_in_v4s_own_chats(tenants: Tenants, shape: str, thinking: bool):
    tenants.a.flush()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello, what is it?"},
        {"role": "user", "content": shape.format(tenants.text)},
    ]
    found = tenants.a.client.chat.completions.create(
        model=tenants.a.model,
        messages=messages,
        max_tokens=4,
        temperature=0,
        extra_body={"chat_template_kwargs": {"thinking": thinking}, "ignore_eos": True},
    )
    report = found.metadata["redknot"][0]
    assert report["arm"] == "reuse"
    assert found.usage.prompt_tokens == report["prompt_tokens"]
    [one] = report["documents"]
    assert one["artifact_id"] == tenants.artifact
    assert one["artifact_tokens"] == len(tenants.ids)
    assert one["matched"] >= len(tenants.ids) - 2 * 32  # a block at each edge, whose tokens merged
    assert report["forwarded_rows"] == report["prompt_tokens"] - report["reused_tokens"]


def test_the_chat_is_v4s(tenants: Tenants):
    """The same ids as the recipe's, control tokens included."""
    from sglang.srt.entrypoints.openai.chat_encoding import encode_simple_chat
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "Where is the guard?"}]
    ids = encode_simple_chat(
        tokenizer=AutoTokenizer.from_pretrained(tenants.checkpoint), spec="dsv4", messages=messages
    )
    assert ids[0] == BOS
    said = tenants.a.client.chat.completions.create(
        model=tenants.a.model,
        messages=messages,
        max_tokens=6,
        temperature=0,
        extra_body={"ignore_eos": True, "chat_template_kwargs": {"thinking": False}},
    )
    assert said.usage.prompt_tokens == len(ids)
    raw = tenants.a.generate(ids, 6)
    assert raw.cached == 0 or raw.report["cached_tokens"] <= len(ids)
    assert said.metadata["redknot"][0]["prompt_tokens"] == raw.report["prompt_tokens"]
