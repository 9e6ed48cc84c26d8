"""Rounds against a server that streams as SGLang does: the plan is kept whatever it does, and no failure is hidden."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from eval.encoded import Encoded
from eval.engines.base import Reply
from eval.engines.wire import Request, Stream
from eval.serving.client import closed_loop, open_loop
from tests.kit.fakesglang import Fake, faking, last


@pytest.fixture
def fake() -> Iterator[Fake]:
    with faking() as found:
        yield found


def requests(count: int, length: int = 3) -> list[Request]:
    prompts = [Encoded(np.arange(9 + number, dtype=np.int32), ((1, 8),)) for number in range(count)]
    return [Request(prompt, {"reuse": "auto", "profile": "turbo"}, length, "key", exact=True) for prompt in prompts]


def read(stream: Stream) -> Reply:
    return stream.reply("")


def count() -> tuple[list[int], Any]:
    ended: list[int] = []
    return ended, lambda: ended.append(1)


def test_requests_do_not_wait_for_each_other(fake):
    fake.first_s = 0.5
    ended, done = count()
    plan = [0.0, 0.05, 0.1, 0.15, 0.2]
    shots = open_loop(fake.url, requests(5), plan, read, done)
    assert len(ended) == 5
    assert fake.most > 1
    assert [shot.number for shot in shots] == [0, 1, 2, 3, 4]
    assert [shot.arrived_s for shot in shots] == plan
    for shot in shots:
        assert shot.error == ""
        assert shot.new_tokens == 3
        assert shot.reply is not None
        assert shot.late_s >= 0
        # Measured from the plan: what the client lost itself is in it.
        assert shot.latency_s >= shot.ttft_s >= 0.5 + shot.late_s - 0.01
    assert [len(body["input_ids"]) for body in sorted(fake.bodies, key=lambda body: len(body["input_ids"]))] == [
        9 + number for number in range(5)
    ]


def test_so_many_clients_and_no_more(fake):
    fake.first_s = 0.05
    shots = closed_loop(fake.url, requests(9), 3, read, lambda: None)
    assert fake.most <= 3
    assert [shot.number for shot in shots] == list(range(9))
    assert all(shot.error == "" for shot in shots)
    alone = closed_loop(fake.url, requests(3), 1, read, lambda: None)
    for one, following in pairwise(alone):
        assert following.arrived_s >= one.arrived_s + one.latency_s


@pytest.mark.parametrize(
    ("behaviour", "error", "tokens"),
    [
        ({"status": 500}, "answered 500: no memory", 0),
        ({"cut": True}, "cut after 2 tokens", 2),
        ({"done": False}, "cut after 3 tokens", 3),
        ({"lie": last(completion_tokens=7)}, "it counts 7", 3),
        ({"lie": lambda body, events: events[:2]}, "no report|counts", 2),
        ({"lie": lambda body, events: [{"error": {"message": "it broke"}}]}, "it broke", 0),
    ],
)
def test_failures_are_kept(fake, behaviour, error, tokens):
    for name, value in behaviour.items():
        setattr(fake, name, value)
    [shot] = open_loop(fake.url, requests(1), [0.0], read, lambda: None)
    assert any(one in shot.error for one in error.split("|"))
    assert shot.reply is None
    assert shot.new_tokens == tokens
    assert (shot.ttft_s > 0) == (tokens > 0)
    assert shot.latency_s > 0


def test_a_failure_is_its_requests_alone(fake):
    fake.lie = lambda body, events: [{"error": "no"}] if len(body["input_ids"]) == 10 else events
    shots = open_loop(fake.url, requests(3), [0.0, 0.0, 0.0], read, lambda: None)
    assert [bool(shot.error) for shot in shots] == [False, True, False]


def test_nobody_listens():
    with faking() as gone:
        pass
    shots = open_loop(gone.url, requests(2), [0.0, 0.0], read, lambda: None)
    assert all("127.0.0.1" in shot.error for shot in shots)
