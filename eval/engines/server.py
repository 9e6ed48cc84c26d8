"""A running server over HTTP: what it says of itself, its prefix cache, and one streamed request after another."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from eval.engines.wire import Request, ServerError, Stream, parsed, refusal, shown

CONNECT_S, ANSWER_S = 10.0, 600.0  # longest waits: for a connection, and between two tokens
TIMEOUT = httpx2.Timeout(ANSWER_S, connect=CONNECT_S)
HEADERS = {"content-type": "application/json"}
_REST_S = 120.0  # until a server has ended what it was asked


@dataclass(frozen=True)
class Description:
    """What a server is."""

    checkpoint: str | None  # digest of its model's identity; None when it has no store
    profiles: Mapping[str, str]  # digests of the profiles that requests may name
    store: str
    tp: int
    version: str  # of SGLang


class Server:
    """A client. A proxy would be measured too, so none is used."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._client = httpx2.Client(timeout=TIMEOUT, trust_env=False)

    def healthy(self) -> bool:
        """Whether it answers requests."""
        try:
            return bool(self._client.get(f"{self.url}/health", timeout=CONNECT_S).status_code == 200)
        except httpx2.HTTPError:
            return False

    def describe(self) -> Description:
        """Ask it; ServerError when it does not answer, or is not one of ours."""
        state, info = self._get("/redknot/health"), self._get("/server_info")
        try:
            return Description(
                checkpoint=state["checkpoint"],
                profiles=dict(state["profiles"]),
                store=str(state["store"]),
                tp=int(state["tp_size"]),
                version=str(info["version"]),
            )
        except (KeyError, TypeError, ValueError):
            raise ServerError(f"{self.url} does not say which checkpoint and profiles it has; is it older?") from None

    def ask(self, request: Request) -> Stream:
        """One request to its end; read its reply from the stream. ServerError with what went wrong."""
        content = request.body
        stream = Stream(request, time.perf_counter())
        try:
            with self._client.stream("POST", f"{self.url}/generate", content=content, headers=HEADERS) as answer:
                if answer.status_code != 200:
                    raise refusal(answer.status_code, answer.read().decode(errors="replace"))
                for line in answer.iter_lines():
                    stream.feed(line, time.perf_counter())
        except httpx2.HTTPError as error:
            raise unreachable(self.url, error) from None
        return stream

    def flush(self) -> None:
        """Empty the prefix cache, which a server does when it is at rest."""
        deadline = time.monotonic() + _REST_S
        while True:
            try:
                status = self._client.post(f"{self.url}/flush_cache").status_code
            except httpx2.HTTPError as error:
                raise unreachable(self.url, error) from None
            if status == 200:
                return
            if time.monotonic() > deadline:
                raise ServerError(f"{self.url} has not come to rest within {_REST_S:.0f} s; does somebody else use it?")
            time.sleep(0.1)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _get(self, path: str) -> dict[str, Any]:
        try:
            answer = self._client.get(f"{self.url}{path}", timeout=CONNECT_S)
        except httpx2.HTTPError as error:
            raise unreachable(self.url, error) from None
        except httpx2.InvalidURL as error:
            raise ServerError(f"{self.url} is no address of a server ({shown(str(error))})") from None
        if answer.status_code == 404:
            raise ServerError(f"{self.url} has no {path}; a server must be started with --enable-redknot")
        if answer.status_code != 200:
            raise refusal(answer.status_code, answer.text)
        return parsed(answer.text)


def unreachable(url: str, error: httpx2.HTTPError) -> ServerError:
    """The error of a connection that could not be made, or broke."""
    return ServerError(f"{url}: {shown(str(error)) or type(error).__name__}")
