"""An HTTP server that streams as SGLang's /generate does with RedKnot, and lies where a test wants it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

from redknot.model.profile import SHIPPED, load_profile

Event = dict[str, Any]
DIGESTS = {name: profile.digest() for name, profile in SHIPPED.items()}


def report_of(body: Event, digests: dict[str, str] = DIGESTS) -> Event:
    """The report of a request that did what it was asked to."""
    wish = body["sampling_params"]["custom_params"]["redknot"]
    reuses = wish["reuse"] != "off" and wish["spans"]
    return {
        "arm": "reuse" if reuses else "dense",
        "reason": None if reuses else "reuse_off",
        "detail": None,
        "profile": wish["profile"],
        "profile_digest": digests.get(wish["profile"], ""),
        "prompt_tokens": len(body["input_ids"]),
        "cached_tokens": 0,
        "reused_tokens": sum(end - start for start, end in wish["spans"]) if reuses else 0,
        "forwarded_rows": 1,
        "certified": len(wish["spans"]) if reuses else 0,
        "ledgers": {},
        "documents": [{"reason": None} for _ in wish["spans"]],
        "ttft_request_s": 0.002,
        "ttft_forward_s": 0.001,
    }


def events_of(body: Event, digests: dict[str, str] = DIGESTS) -> list[Event]:
    """The events of a whole answer: text and ids grow, the last one says why it ended."""
    length = body["sampling_params"]["max_new_tokens"]
    found = []
    for count in range(1, length + 1):
        meta = {"prompt_tokens": len(body["input_ids"]), "completion_tokens": count, "cached_tokens": 0}
        meta["finish_reason"] = {"type": "length", "length": length} if count == length else None
        meta["redknot"] = report_of(body, digests) if count == length else None
        found.append({"text": " word" * count, "output_ids": [9] * count, "meta_info": meta})
    return found


@dataclass
class Fake:
    """``lie`` may change the events of a request; other fields say what it does beside."""

    url: str = ""
    lie: Callable[[Event, list[Event]], list[Event]] = lambda _, events: events
    status: int = 200
    refusal: str = '{"error": {"message": "no memory"}}'
    cut: bool = False  # the connection ends before the last event
    done: bool = True  # whether [DONE] is said
    first_s: float = 0.0  # in front of the first token
    busy: int = 0  # times that a flush is refused
    digests: dict[str, str] = field(default_factory=lambda: dict(DIGESTS))
    health: Event = field(default_factory=dict)  # in place of what /redknot/health says
    checkpoint: str | None = "c" * 64
    bodies: list[Event] = field(default_factory=list)  # of /generate, as they came
    flushed: int = 0
    running: int = 0
    most: int = 0  # that ran at the same time
    lock: threading.Lock = field(default_factory=threading.Lock)

    def state(self) -> Event:
        return {
            "checkpoint": self.checkpoint,
            "profiles": self.digests,
            "store": "there",
            "tp_size": 1,
        } | self.health

    def answer(self, body: Event) -> Iterator[str]:
        events = self.lie(body, events_of(body, self.digests))
        time.sleep(self.first_s)
        for event in events[:-1] if self.cut else events:
            yield f"data: {json.dumps(event)}\n\n"
        if self.done and not self.cut:
            yield "data: [DONE]\n\n"


class _Handler(BaseHTTPRequestHandler):
    fake: Fake

    def do_GET(self) -> None:
        found = {"/health": {}, "/redknot/health": self.fake.state(), "/server_info": {"version": "0.5.23"}}
        if self.path in found:
            self._say(200, json.dumps(found[self.path]))
        else:
            self._say(404, '{"detail": "Not Found"}')

    def do_POST(self) -> None:
        fake = self.fake
        raw = self.rfile.read(int(self.headers["content-length"] or 0))
        if self.path == "/flush_cache":
            fake.busy, busy = max(fake.busy - 1, 0), fake.busy
            fake.flushed += not busy
            self._say(400 if busy else 200, "flushed")
            return
        body = json.loads(raw)
        with fake.lock:
            fake.bodies.append(body)
            fake.running += 1
            fake.most = max(fake.most, fake.running)
        try:
            if fake.status != 200:
                self._say(fake.status, fake.refusal)
                return
            self.send_response(200)
            self.end_headers()
            for text in fake.answer(body):
                self.wfile.write(text.encode())
                self.wfile.flush()
        finally:
            with fake.lock:
                fake.running -= 1

    def _say(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def _server(fake: Fake, port: int) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (_Handler,), {"fake": fake}))
    server.daemon_threads = True
    return server


def launch(words: Sequence[str], **options: Any) -> None:
    """What `sglang.launch_server` does with these words: serve for ever, on their port and with their profiles."""
    given = dict(pairwise(words))
    fake = Fake(**options)
    if "--redknot-config" in given:
        sources = json.loads(Path(given["--redknot-config"]).read_text(encoding="utf-8"))["profiles"]
        fake.digests |= {profile.name: profile.digest() for profile in map(load_profile, sources)}
    _server(fake, int(given["--port"])).serve_forever()


@contextmanager
def faking(**options: Any) -> Iterator[Fake]:
    """A fake on a free port."""
    fake = Fake(**options)
    with _server(fake, 0) as server:
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()


def last(**changes: Any) -> Callable[[Event, list[Event]], list[Event]]:
    """A lie in the meta_info of the last event."""

    def lie(_: Event, events: list[Event]) -> list[Event]:
        events[-1]["meta_info"] |= changes
        return events

    return lie


def in_report(**changes: Any) -> Callable[[Event, list[Event]], list[Event]]:
    """A lie in the report."""

    def lie(_: Event, events: list[Event]) -> list[Event]:
        events[-1]["meta_info"]["redknot"] |= changes
        return events

    return lie
