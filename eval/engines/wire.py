"""SGLang's /generate as a client sees it: what is sent, and what the events of its stream come to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from eval.encoded import Encoded, prompt_sha256
from eval.engines.base import Reply
from redknot.errors import RedKnotError

_DATA, _DONE = "data:", "[DONE]"
_SHOWN = 300  # characters of a server's message


class ServerError(RedKnotError):
    """A server that cannot be reached, refuses, fails, or whose answer cannot be what was asked for."""


@dataclass(frozen=True)
class Request:
    """One request of one arm. ``key`` keeps its pages apart: requests of one key share prefixes, others never do."""

    prompt: Encoded
    wish: Mapping[str, Any]  # custom_params.redknot, without the spans
    new_tokens: int
    key: str
    exact: bool = False  # so many tokens and no fewer, whatever they are
    shares: bool = False  # whether tokens may come from the prefix cache

    @cached_property
    def body(self) -> bytes:
        """JSON, made before any clock starts."""
        redknot = dict(self.wish) | {"spans": [list(span) for span in self.prompt.spans]}
        sampling = {
            "max_new_tokens": self.new_tokens,
            "temperature": 0,
            "ignore_eos": self.exact,
            "custom_params": {"redknot": redknot},
        }
        ids = self.prompt.token_ids.tolist()
        asked = {"input_ids": ids, "sampling_params": sampling, "stream": True, "extra_key": self.key}
        return json.dumps(asked).encode()

    @property
    def sent_sha256(self) -> str:
        """Of the tokens and spans as they stand in the body."""
        sent = json.loads(self.body)
        spans = sent["sampling_params"]["custom_params"]["redknot"]["spans"]
        return prompt_sha256(sent["input_ids"], [(start, end) for start, end in spans])


@dataclass
class Stream:
    """Reads the lines of one answer; times are the caller's, in seconds of one clock."""

    request: Request
    started: float
    first: float | None = None  # when the first token was there
    last: float = 0.0  # when the newest one was
    _event: dict[str, Any] = field(default_factory=dict)
    _done: bool = False

    def feed(self, line: str, now: float) -> None:
        """One line of the body; ServerError for one that is no event, or that reports a failure."""
        if not line.startswith(_DATA):
            if line.strip():
                raise ServerError(f"the server streamed something else than events: {shown(line)}")
            return
        text = line.removeprefix(_DATA).strip()
        if text == _DONE:
            self._done = True
            return
        event = parsed(text)
        if "error" in event:
            raise ServerError(f"the server failed: {message_of(event)}")
        ids = event.get("output_ids", [])
        if not isinstance(ids, list):
            raise ServerError(f"the server streamed no list of tokens: {shown(text)}")
        if len(ids) > self.received:
            self.first = now if self.first is None else self.first
            self.last = now
        self._event = event

    @property
    def received(self) -> int:
        """Tokens that came."""
        return len(self._event.get("output_ids", ()))

    def reply(self, checkpoint: str) -> Reply:
        """The answer; ServerError where it was cut, or counts other tokens than were sent and received."""
        ids, text, meta = self._event.get("output_ids", []), self._event.get("text", ""), self._event.get("meta_info")
        if not self._done or self.first is None or not isinstance(meta, Mapping):
            raise ServerError(f"the stream was cut after {len(ids)} tokens")
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise ServerError(f"the server gave up: {shown(str(reason.get('message', '')))}")
        report = meta.get("redknot")
        if not isinstance(report, Mapping):
            raise ServerError("the answer has no report; the server must run with --enable-redknot")
        self._check_counts(len(ids), meta, report)
        if reason.get("type") == "stop" and ids and ids[-1] == reason.get("matched"):
            ids = ids[:-1]  # the token that ends an answer is no part of it, as in the embedded engine
        return Reply(
            text=text,
            token_ids=tuple(ids),
            report=report,
            ttft_request_s=self.first - self.started,
            ttft_forward_s=float(report["ttft_forward_s"]),
            prompt_sha256=self.request.sent_sha256,
            max_new_tokens=self.request.new_tokens,
            checkpoint=checkpoint,
        )

    def _check_counts(self, received: int, meta: Mapping[str, Any], report: Mapping[str, Any]) -> None:
        sent = len(self.request.prompt)
        for where, counted in (("it", meta.get("prompt_tokens")), ("its report", report.get("prompt_tokens"))):
            if counted != sent:
                raise ServerError(f"unequal tokens: {sent} were sent, {where} counts {counted}")
        if meta.get("completion_tokens") != received:
            raise ServerError(f"unequal tokens: {received} came, it counts {meta.get('completion_tokens')}")
        if received > self.request.new_tokens or (self.request.exact and received != self.request.new_tokens):
            raise ServerError(f"unequal tokens: {received} came, {self.request.new_tokens} were asked for")
        cached = max(int(meta.get("cached_tokens") or 0), int(report.get("cached_tokens") or 0))
        if cached and not self.request.shares:
            raise ServerError(f"a prefix advantage: {cached} tokens came from the prefix cache")


def parsed(text: str) -> dict[str, Any]:
    """A JSON object; ServerError for anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServerError(f"the server sent something else than a JSON object: {shown(text)}")
    return found


def message_of(event: Mapping[str, Any]) -> str:
    """What an error says, of the forms that SGLang has."""
    error = event.get("error", event)
    return shown(str(error.get("message", error) if isinstance(error, Mapping) else error))


def refusal(status: int, body: str) -> ServerError:
    """The error of an answer that is not 200."""
    try:
        message = message_of(parsed(body))
    except ServerError:
        message = shown(body)
    return ServerError(f"the server answered {status}: {message}")


def shown(text: str) -> str:
    """One line of what may be long."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
