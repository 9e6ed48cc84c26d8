"""The real server, as a user starts it: on a free loopback port, with clients for it, and nothing left behind."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from eval.engines.launched import Launched

openai = pytest.importorskip("openai", reason="the server's tests run where the sglang extra is installed")
requests = pytest.importorskip("requests", reason="the server's tests run where the sglang extra is installed")

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "models" / "nano"
TIE = 1e-3  # rows whose two best logits are closer may go either way
_REQUEST_LIMIT_S = 120
_TAIL_CHARACTERS = 3000


@dataclass(frozen=True)
class Answer:
    """What /generate said to one request."""

    text: str
    ids: list[int]
    margins: list[float]  # between the two best logits of each token
    meta: dict[str, Any]

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = self.meta["redknot"]
        return found

    @property
    def cached(self) -> int:
        return int(self.meta["cached_tokens"])


def differs(found: Sequence[int], margins: Sequence[float], wanted: Sequence[int]) -> bool:
    """Whether an answer is another one, up to the first token that two others are equally likely to be."""
    for one, other, margin in zip(found, wanted, margins, strict=True):
        if one != other:
            return margin >= TIE
    return False


@dataclass
class Server:
    """A running server."""

    url: str
    log: Path
    key: str | None = None  # sent with every request
    session: Any = field(default_factory=lambda: requests.Session())

    def as_key(self, key: str | None) -> Server:
        """The same server for another client."""
        return Server(self.url, self.log, key)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key is not None else {}

    @cached_property
    def client(self) -> Any:
        """The openai client."""
        key = self.key or "none"
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=_REQUEST_LIMIT_S)

    @cached_property
    def model(self) -> str:
        found: str = self.client.models.list().data[0].id
        return found

    def call(self, method: str, path: str, **kwargs: Any) -> Any:
        """A request whose status the caller looks at."""
        given = {"timeout": _REQUEST_LIMIT_S, "headers": self.headers} | kwargs
        # Not the session's: tests call from many threads.
        return requests.request(method, self.url + path, **given)

    def get(self, path: str) -> Any:
        """Body of a GET that must work."""
        return _body(self.call("GET", path))

    def post(self, path: str, body: Any) -> Any:
        """Body of a POST that must work."""
        return _body(self.call("POST", path, json=body))

    def body(
        self,
        prompt: str | Sequence[int],
        length: int = 8,
        redknot: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """What :meth:`generate` sends; ``sampling`` is added to the sampling parameters, the rest to the body."""
        sampling = {"max_new_tokens": length, "temperature": 0, "ignore_eos": True} | more.pop("sampling", {})
        if redknot is not None:
            sampling["custom_params"] = {"redknot": dict(redknot)}
        given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        asked = {"return_logprob": True, "top_logprobs_num": 2}
        return given | {"sampling_params": sampling} | asked | more

    def generate(
        self,
        prompt: str | Sequence[int],
        length: int = 8,
        redknot: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Answer:
        """A greedy answer of /generate, with its margins."""
        return answer_of(self.post("/generate", self.body(prompt, length, redknot, **more)))

    def refused(self, path: str, body: Any, status: int = 400) -> str:
        """The message of a request that must be refused."""
        response = self.call("POST", path, json=body)
        assert response.status_code == status, (response.status_code, response.text[:500])
        return str(response.text)

    def stream(self, path: str, body: Any) -> Iterator[Any]:
        """The events of a stream; leaving it closes the connection."""
        with self.call("POST", path, json=body | {"stream": True}, stream=True) as response:
            assert response.status_code == 200, response.text[:500]
            for line in response.iter_lines():
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield json.loads(line.removeprefix(b"data: "))

    def health(self) -> dict[str, Any]:
        """What /redknot/health says."""
        found: dict[str, Any] = self.get("/redknot/health")
        return found

    def flush(self) -> None:
        """Empty the prefix cache, which the server does only when nothing runs."""
        deadline = time.monotonic() + 30
        while self.call("POST", "/flush_cache").status_code != 200:
            assert time.monotonic() < deadline, "the server never came to rest"
            time.sleep(0.1)

    def at_rest(self) -> dict[str, Any]:
        """Health of the flushed server, which must hold nothing."""
        self.flush()
        deadline = time.monotonic() + 10
        while (state := self.health())["requests"] and time.monotonic() < deadline:
            time.sleep(0.2)
        assert state["requests"] == 0, state
        assert state["pages"] == 0, state
        assert state["books"] == "balanced"
        return state

    def together(self, bodies: Sequence[Mapping[str, Any]], clients: int = 16) -> list[Answer]:
        """Answers of /generate to many bodies, so many at a time."""
        with ThreadPoolExecutor(clients) as pool:
            return [answer_of(one) for one in pool.map(lambda body: self.post("/generate", body), bodies)]


def answer_of(item: Mapping[str, Any]) -> Answer:
    """One item of a response of /generate."""
    meta = item["meta_info"]
    pairs = meta.get("output_top_logprobs") or []
    margins = [float(pair[0][0]) - float(pair[1][0]) for pair in pairs]
    return Answer(item["text"], list(item["output_ids"]), margins, meta)


def _body(response: Any) -> Any:
    assert response.status_code in (200, 202), (response.status_code, response.text[:2000])
    return response.json() if "json" in response.headers.get("content-type", "") else response.text


@contextmanager
def serving(
    folder: Path,
    store: Path,
    *options: str | int,
    model: str | Path = "nano",
    key: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start a server, wait until it is healthy, and end all its processes; what it wrote is shown if that fails.

    ``environment`` is for SGLang's own switches of its tests; a user needs none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    variables = os.environ | {"OMP_NUM_THREADS": "1", "REDKNOT_CACHE_DIR": str(folder / "cache")} | (environment or {})
    log = folder / "server.log"
    launched = Launched(model, store, [str(option) for option in options], log=log, environment=variables)
    try:
        with launched:
            yield Server(launched.url, log, key)
            assert launched.running, "the server ended"
    except BaseException as error:
        error.add_note(f"the server wrote:\n{tail(log)}")
        raise


def tail(log: Path) -> str:
    """The end of what a server wrote."""
    return log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:]
