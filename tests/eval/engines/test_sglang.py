"""The engine over a server, against one that streams as SGLang does: arms are kept apart, refusals are one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.arms import find_arms
from eval.encoded import Encoded
from eval.engines.base import ArmEngine
from eval.engines.opening import open_engine
from eval.engines.server import Server
from eval.engines.wire import ServerError
from eval.engines.wishes import check_servable, named_files
from eval.guard import objection
from eval.provenance import checkpoint_identity
from redknot.errors import ConfigError
from tests.kit.child import NANO
from tests.kit.fakesglang import Fake, events_of, faking, in_report, last

ARMS = find_arms(["rowsparse", "turbo", "plain", "prefix"])
PROMPT = Encoded(np.arange(20, dtype=np.int32), ((1, 8), (8, 16)))


@pytest.fixture(scope="module")
def digest() -> str:
    return checkpoint_identity(NANO).digest


@pytest.fixture
def fake(digest) -> Iterator[Fake]:
    with faking(checkpoint=digest) as found:
        found.digests["plain"] = ARMS["plain"].profile.digest()
        yield found


def opened(fake: Fake, arms: Any = ARMS, tp: int = 1) -> ArmEngine:
    return open_engine(f"sglang={fake.url}", NANO, NANO, arms, tp)


def wish(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["sampling_params"]["custom_params"]["redknot"]
    return found


def test_every_arm_is_asked_for_by_its_profile(fake, digest):
    engine = opened(fake)
    assert (engine.name, engine.tp, engine.versions) == ("sglang", 1, {"sglang": "0.5.23"})
    fake.bodies.clear()
    for name, arm in ARMS.items():
        reply = engine.answer(name, PROMPT, 3)
        assert reply.token_ids == (9, 9, 9)
        assert objection(reply, PROMPT, 3, digest, arm.profile) is None
    engine.close()
    asked = {name: (wish(body)["reuse"], wish(body)["profile"]) for name, body in zip(ARMS, fake.bodies, strict=True)}
    assert asked == {
        "recompute": ("off", "recompute"),
        "rowsparse": ("auto", "rowsparse"),
        "turbo": ("auto", "turbo"),
        "plain": ("auto", "plain"),
        "prefix": ("off", "recompute"),
    }
    assert all(wish(body)["spans"] == [[1, 8], [8, 16]] for body in fake.bodies)


def test_only_requests_of_the_prefix_arm_share_a_prefix(fake):
    engine = opened(fake)
    fake.bodies.clear()
    for arm in ("recompute", "recompute", "turbo", "turbo"):
        engine.answer(arm, PROMPT, 1)
    assert len({body["extra_key"] for body in fake.bodies}) == 4
    fake.bodies.clear()
    fake.lie = last(cached_tokens=7)
    for _ in range(2):
        engine.answer("prefix", PROMPT, 1)
    assert len({body["extra_key"] for body in fake.bodies}) == 1
    with pytest.raises(ServerError, match="prefix advantage"):
        engine.answer("recompute", PROMPT, 1)


def test_the_clock_runs_to_the_first_token(fake):
    engine = opened(fake)
    fake.first_s = 0.2
    assert engine.answer("turbo", PROMPT, 2).ttft_request_s >= 0.2


def test_what_ran_otherwise_is_the_guards_to_reject(fake, digest):
    engine = opened(fake)
    fake.lie = in_report(arm="dense", reason="nothing_to_reuse", detail="no document was found")
    reply = engine.answer("turbo", PROMPT, 1)
    assert "ran dense: nothing_to_reuse" in str(objection(reply, PROMPT, 1, digest, ARMS["turbo"].profile))
    fake.lie = in_report(profile="rowsparse", profile_digest=ARMS["rowsparse"].profile.digest())
    reply = engine.answer("turbo", PROMPT, 1)
    assert "another profile ran: rowsparse" in str(objection(reply, PROMPT, 1, digest, ARMS["turbo"].profile))
    with pytest.raises(ServerError, match="another profile ran: rowsparse, not recompute"):
        engine.answer("prefix", PROMPT, 1)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"status": 500}, "answered 500: no memory"),
        ({"cut": True}, "cut after 2 tokens"),
        ({"done": False}, "cut after 3 tokens"),
        ({"lie": last(prompt_tokens=19)}, "20 were sent, it counts 19"),
        ({"lie": lambda body, events: [*events, {"error": {"message": "it broke"}}]}, "failed: it broke"),
        ({"lie": lambda body, events: [*events, events_of(body)[0]]}, "1 came|counts 1|no report"),
    ],
)
def test_failures(fake, behaviour, message):
    engine = opened(fake)
    for name, value in behaviour.items():
        setattr(fake, name, value)
    with pytest.raises(ServerError, match=message) as caught:
        engine.answer("turbo", PROMPT, 3)
    assert "\n" not in str(caught.value)


def test_a_server_that_is_gone(fake):
    engine = opened(fake)
    url = fake.url
    with faking() as other:
        gone = other.url
    engine._server.url = gone  # type: ignore[attr-defined]
    with pytest.raises(ServerError, match=r"127.0.0.1"):
        engine.answer("turbo", PROMPT, 1)
    engine._server.url = url  # type: ignore[attr-defined]
    engine.answer("turbo", PROMPT, 1)


@pytest.mark.parametrize(
    ("health", "message"),
    [
        ({"checkpoint": "d" * 64}, r"serves checkpoint dddddddddddd, and .* give its --model"),
        ({"checkpoint": None}, "cannot use its store there"),
        ({"tp_size": 2}, "has 2 ranks; give --tp 2"),
        ({"tp_size": None}, "does not say"),
        ({"profiles": {}}, "does not have profile recompute"),
    ],
)
def test_a_server_that_is_another(fake, health, message):
    fake.health = health
    with pytest.raises((ConfigError, ServerError), match=message):
        opened(fake)


def test_a_profile_that_the_server_does_not_have(fake):
    del fake.digests["plain"]
    with pytest.raises(
        ConfigError, match=r"does not have profile plain; .*--redknot-config .*profiles: \[.*plain.json\]"
    ):
        opened(fake)
    fake.digests["plain"] = "e" * 64
    with pytest.raises(ConfigError, match="has another profile by the name plain"):
        opened(fake)


def test_arms_that_no_server_runs():
    with pytest.raises(ConfigError, match=r"arm fan-out: .*--engine embedded"):
        check_servable(find_arms(["fan-out"]))
    assert [path.rpartition("/")[2] for path in named_files(ARMS)] == ["plain.json"]


def test_cold_times_need_a_server_of_our_own(fake):
    engine = opened(fake)
    with pytest.raises(ConfigError, match=r"cold times need a server that is started here"):
        engine.forget("turbo")


def test_a_server_of_our_own(sglang, digest, tmp_path):
    sglang(f"import sys; from tests.kit.fakesglang import launch; launch(sys.argv[1:], checkpoint={digest!r})")
    engine = open_engine("sglang", NANO, tmp_path / "store", ARMS, 1)
    first = engine._launched.url  # type: ignore[attr-defined]
    assert engine.answer("plain", PROMPT, 2).report["profile"] == "plain"
    engine.forget("plain")
    second = engine._launched.url  # type: ignore[attr-defined]
    assert engine.answer("turbo", PROMPT, 2).report["arm"] == "reuse"
    assert not Server(first).healthy()
    engine.close()
    assert not Server(second).healthy()


def test_a_server_of_our_own_that_is_another_is_stopped(sglang, tmp_path):
    sglang("import sys; from tests.kit.fakesglang import launch; launch(sys.argv[1:])")
    with pytest.raises(ConfigError, match="serves checkpoint cccccccccccc"):
        open_engine("sglang", NANO, tmp_path / "store", ARMS, 1)
    assert not [one for one in Path("/proc").glob("[0-9]*") if str(tmp_path / "store") in words_of(one)]


def words_of(process: Path) -> str:
    try:
        return (process / "cmdline").read_text(encoding="utf-8").replace("\0", " ")
    except OSError:
        return ""


@pytest.mark.parametrize("url", ["nowhere", "http://", "http://127.0.0.1:1", "http://[", "http://a b"])
def test_addresses_that_lead_nowhere(url):
    with pytest.raises(ServerError) as caught:
        open_engine(f"sglang={url}", NANO, NANO, ARMS, 1)
    assert url in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_is_not_ours(fake):
    server = Server(f"{fake.url}/elsewhere")
    assert not server.healthy()
    with pytest.raises(ServerError, match=r"has no /redknot/health; .*--enable-redknot"):
        server.describe()


def test_flushing_waits_for_a_server_at_rest(fake):
    fake.busy = 2
    server = Server(fake.url)
    server.flush()
    assert (fake.busy, fake.flushed) == (0, 1)
