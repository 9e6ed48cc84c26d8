"""Sixteen clients at once, of every kind, while documents come and go: every answer right, and nothing left behind."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from redknot.model.profile import SHIPPED
from tests.e2e.server.conftest import World
from tests.e2e.server.reference import FILE, LENGTH, prompts
from tests.kit.requests import BOS, document, publish
from tests.kit.server import Answer, Server, differs

OFF = {"reuse": "off"}
CLIENTS = 16
ROWS = 8  # reusing requests whose answers are known
VOLATILE = 3  # documents that are deleted and built again
CHECKED = 10  # requests over volatile documents that are asked again when all is quiet


@dataclass
class Load:
    """What the clients share."""

    server: Server
    until: float
    dense: list[tuple[list[int], dict[str, Any]]]
    reusing: list[tuple[list[int], Answer]]
    volatile: list[list[int]]
    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    open_questions: list[tuple[list[int], Answer]] = field(default_factory=list)

    def client(self, number: int) -> None:
        draw = random.Random(number)
        actions: list[tuple[str, Callable[[random.Random], None]]] = [
            ("dense", self.ask_dense),
            ("dense", self.ask_dense),
            ("reuse", self.ask_reusing),
            ("reuse", self.ask_reusing),
            ("volatile", self.ask_volatile),
            ("leave", self.leave_stream),
            ("abort", self.abort),
            ("several", self.ask_several),
            ("malformed", self.ask_malformed),
        ]
        while time.monotonic() < self.until:
            name, action = draw.choice(actions)
            try:
                action(draw)
                self.done[name] += 1
            except Exception as error:  # noqa: BLE001  all of them are told at the end
                self.faults.append(f"{name}: {type(error).__name__}: {error}"[:600])

    def ask_dense(self, draw: random.Random) -> None:
        ids, known = draw.choice(self.dense)
        answer = self.server.generate(ids, LENGTH, OFF)
        assert not differs(answer.ids, known["margins"], known["answer"]), "another dense answer"

    def ask_reusing(self, draw: random.Random) -> None:
        ids, known = draw.choice(self.reusing)
        answer = self.server.generate(ids, LENGTH)
        assert answer.report["arm"] == "reuse", answer.report["reason"]
        assert not differs(answer.ids, known.margins, known.ids), "another answer with reuse"

    def ask_volatile(self, draw: random.Random) -> None:
        ids = [BOS, *document(9, draw.randrange(10**9)), *draw.choice(self.volatile), *document(9, 1)]
        answer = self.server.generate(ids, LENGTH)
        assert answer.report["reason"] in (None, "nothing_to_reuse", "stale_generation"), answer.report["reason"]
        self.open_questions.append((ids, answer))

    def leave_stream(self, draw: random.Random) -> None:
        ids, _ = draw.choice(self.reusing)
        leave_at = draw.randint(0, 6)
        for place, _ in enumerate(self.server.stream("/generate", self.server.body(ids, 300))):
            if place == leave_at:
                break

    def abort(self, draw: random.Random) -> None:
        rid = f"abort-{draw.randrange(10**9)}"
        timer = threading.Timer(draw.random(), self.server.call, ("POST", "/abort_request"), {"json": {"rid": rid}})
        timer.start()
        ids, _ = draw.choice(self.dense)
        response = self.server.call("POST", "/generate", json=self.server.body(ids, 200, OFF, rid=rid))
        assert response.status_code in (200, 400, 503), response.text[:200]
        timer.join()

    def ask_several(self, draw: random.Random) -> None:
        ids, _ = draw.choice(self.reusing)
        body = {"model": "nano", "prompt": ids, "n": 2, "max_tokens": 5, "temperature": 0.9}
        found = self.server.post("/v1/completions", body)
        assert len(found["metadata"]["redknot"]) == 2

    def ask_malformed(self, draw: random.Random) -> None:
        wish = draw.choice([{"reuse": "never"}, {"spans": [[0, 10**6]]}, {"profile": "x"}, {"reuse": "required"}])
        self.server.refused("/generate", self.server.body([BOS, 9, 10, 11], 3, wish))

    def churn(self, world: World) -> None:
        """Delete documents over HTTP, and build them again behind the server's back."""
        draw = random.Random(99)
        while time.monotonic() < self.until:
            try:
                ids = draw.choice(self.volatile)
                [certificate] = publish(world.checkpoint, world.store, [ids], [SHIPPED["rowsparse"]])
                time.sleep(draw.uniform(0, 2))
                response = self.server.call("DELETE", f"/redknot/documents/{certificate.artifact_id}")
                assert response.status_code in (200, 409), response.text[:200]
                time.sleep(draw.uniform(0, 1))
                self.done["churn"] += 1
            except Exception as error:  # noqa: BLE001  as above
                self.faults.append(f"churn: {type(error).__name__}: {error}"[:600])


def prepare(main: Server, world: World, seconds: float) -> Load:
    """Answers of the quiet server."""
    main.flush()
    known = json.loads(FILE.read_text(encoding="utf-8"))["answers"]
    names = sorted(world.texts)
    rows = []
    for number in range(ROWS):
        parts = world.documents[names[2 * number]], world.documents["seam-129"], world.documents[names[2 * number + 1]]
        count = 1 + number % 3
        ids = [BOS, *document(6 + number, 1200), *[token for part in parts[:count] for token in part], 70, 71, 72]
        rows.append((ids, main.generate(ids, LENGTH)))
    volatile = [document(160 + 40 * number, 1210) for number in range(VOLATILE)]
    dense = [pair for pair in zip(prompts(), known, strict=True) if len(pair[0]) > 1]
    return Load(main, time.monotonic() + seconds, dense, rows, volatile)


def run(load: Load, world: World) -> None:
    threads = [threading.Thread(target=load.client, args=(number,)) for number in range(CLIENTS)]
    threads.append(threading.Thread(target=load.churn, args=(world,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def check_open_questions(load: Load, world: World) -> None:
    """Ask the quiet server again, for the same arm; with a document that had gone, it must be there again."""
    publish(world.checkpoint, world.store, load.volatile, [SHIPPED["rowsparse"]])
    draw = random.Random(5)
    for ids, answer in draw.sample(load.open_questions, min(CHECKED, len(load.open_questions))):
        load.server.flush()
        arm = answer.report["arm"]
        quiet = load.server.generate(ids, LENGTH, {"reuse": "required"} if arm == "reuse" else OFF)
        assert answer.report["reused_tokens"] == quiet.report["reused_tokens"]
        assert not differs(answer.ids, answer.margins, quiet.ids), arm


def load_test(main: Server, world: World, seconds: float) -> None:
    load = prepare(main, world, seconds)
    before = main.at_rest()
    run(load, world)
    print(dict(load.done))
    assert load.faults == []
    for name in ("dense", "reuse", "volatile", "leave", "abort", "several", "malformed", "churn"):
        assert load.done[name] > 0, name
    after = main.at_rest()
    for tier, held in after["bytes"].items():
        assert held["total"] == before["bytes"][tier]["total"]
    check_open_questions(load, world)
    main.at_rest()


@pytest.mark.timeout(240)
def test_sixteen_clients_for_a_while(main: Server, world: World):
    load_test(main, world, 45)


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_sixteen_clients_for_three_minutes(main: Server, world: World):
    load_test(main, world, 180)
