"""One round of requests: sent when the plan says so whatever the server does, or by clients that wait for answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx2

from eval.engines.base import Reply
from eval.engines.server import HEADERS, TIMEOUT, unreachable
from eval.engines.wire import Request, ServerError, Stream, refusal

Read = Callable[[Stream], Reply]  # the reply of a stream that has ended; ServerError where it does not count
Done = Callable[[], object]  # called when a request has ended


@dataclass(frozen=True)
class Shot:
    """What became of one request; times in seconds, the first since the start of the round, the others since it."""

    number: int
    arrived_s: float
    late_s: float  # sent so much behind the plan, by this client's own fault
    ttft_s: float  # 0 where no token came
    latency_s: float  # to the last token, or to the error
    new_tokens: int
    reply: Reply | None
    error: str = ""


def open_loop(url: str, requests: Sequence[Request], arrivals: Sequence[float], read: Read, done: Done) -> list[Shot]:
    """Send each request at its time, in seconds from the start; however slow the server is, none waits for another."""
    return asyncio.run(_Round(url, requests, read, done).planned(arrivals))


def closed_loop(url: str, requests: Sequence[Request], clients: int, read: Read, done: Done) -> list[Shot]:
    """So many clients; each sends the next request when it has its answer."""
    return asyncio.run(_Round(url, requests, read, done).waiting(clients))


class _Round:
    def __init__(self, url: str, requests: Sequence[Request], read: Read, done: Done) -> None:
        self._url = url.rstrip("/")
        self._requests = requests
        self._read = read
        self._done = done
        self._bodies = [request.body for request in requests]  # no JSON is made while the clock runs
        self._start = 0.0

    async def planned(self, arrivals: Sequence[float]) -> list[Shot]:
        async with self._client() as client:
            self._begin()
            shots = []
            for number, at in enumerate(arrivals):
                await asyncio.sleep(max(self._start + at - time.perf_counter(), 0))
                shots.append(asyncio.create_task(self._shoot(client, number, at)))
            return list(await asyncio.gather(*shots))

    async def waiting(self, clients: int) -> list[Shot]:
        async with self._client() as client:
            self._begin()
            shots: list[Shot] = []
            left = iter(range(len(self._requests)))

            async def one() -> None:
                for number in left:
                    shots.append(await self._shoot(client, number, time.perf_counter() - self._start))

            await asyncio.gather(*(one() for _ in range(clients)))
            return sorted(shots, key=lambda shot: shot.number)

    def _client(self) -> httpx2.AsyncClient:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx2.AsyncClient(timeout=TIMEOUT, limits=limits, trust_env=False)

    def _begin(self) -> None:
        self._start = time.perf_counter()

    async def _shoot(self, client: httpx2.AsyncClient, number: int, arrived: float) -> Shot:
        """One request, measured from when it was to arrive."""
        planned = self._start + arrived
        late = time.perf_counter() - planned
        stream = Stream(self._requests[number], planned)
        reply, error = None, ""
        try:
            await self._send(client, number, stream)
            reply = self._read(stream)
        except ServerError as failed:
            error = str(failed)
        self._done()
        return Shot(
            number=number,
            arrived_s=arrived,
            late_s=late,
            ttft_s=0.0 if stream.first is None else stream.first - planned,
            latency_s=(time.perf_counter() if error else stream.last) - planned,
            new_tokens=stream.received,
            reply=reply,
            error=error,
        )

    async def _send(self, client: httpx2.AsyncClient, number: int, stream: Stream) -> None:
        url, content = f"{self._url}/generate", self._bodies[number]
        try:
            async with client.stream("POST", url, content=content, headers=HEADERS) as answer:
                if answer.status_code != 200:
                    raise refusal(answer.status_code, (await answer.aread()).decode(errors="replace"))
                async for line in answer.aiter_lines():
                    stream.feed(line, time.perf_counter())
        except httpx2.HTTPError as error:
            raise unreachable(self._url, error) from None
