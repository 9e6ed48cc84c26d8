"""What stands in for torch.cuda where streams and events are used: it writes down what was queued where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Streams:
    """A device with the stream that computes and those that somebody made."""

    log: list[tuple[str, str, object]] = field(default_factory=list)  # stream, what, event
    used: list[object] = field(default_factory=list)  # streams that tensors were handed to
    made: int = 0
    current: list[str] = field(default_factory=lambda: ["compute"])

    def Stream(self, device: object) -> str:
        self.made += 1
        return f"copy {self.made}"

    def Event(self) -> _Event:
        return _Event(self)

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    def current_stream(self, device: object) -> _Current:
        return _Current(self, self.current[-1])


class _Event:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def record(self, stream: str) -> None:
        self._streams.log.append((stream, "record", self))


class _Current(str):
    """A stream by name, which can wait."""

    _streams: Streams

    def __new__(cls, streams: Streams, name: str) -> _Current:
        made = super().__new__(cls, name)
        made._streams = streams
        return made

    def wait_event(self, event: Any) -> None:
        self._streams.log.append((str(self), "wait", event))
