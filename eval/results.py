"""`results.jsonl`: every line is one record, appended and flushed as it comes, so that a run can be cut and go on.

A file holds a ``Run`` (who, what, with what) for each start of a tool, and the ``Answer``, ``Timing``, ``Fidelity``,
``Load``, ``Build`` and ``Rejected`` records of those runs. Reports are made from such files alone.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from redknot.errors import InputError

RESULTS = "results.jsonl"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Run(_Record):
    """Provenance of the records that name it."""

    kind: Literal["run"] = "run"
    run: str  # unique
    tool: str  # longbench, ruler, nanoqa, fidelity, serving
    started: str  # ISO 8601, UTC
    command: tuple[str, ...]
    commit: str  # of the code, "+" behind it when files differed from it; "" outside a repository
    versions: dict[str, str]  # redknot, python, torch, sglang where it served
    hardware: dict[str, Any]  # processor, cores, threads, memory_bytes, device
    model: dict[str, str]  # name, and hashes of configuration, weights and tokenizer
    engine: str  # "embedded" or "sglang"
    tp: int
    arms: dict[str, dict[str, Any]]  # the whole profile of each, as JSON
    digests: dict[str, str]  # profile hash of each arm
    options: dict[str, Any]  # seeds, limits, counts


class Answer(_Record):
    """One arm's answer to one question."""

    kind: Literal["answer"] = "answer"
    run: str
    dataset: str
    item: str  # unique within the data set
    cluster: str  # items of one cluster share their context
    arm: str
    prompt_tokens: int
    prompt_sha256: str  # of the token ids and of where the documents stand: equal for all arms of an item
    max_new_tokens: int
    cut: bool  # the middle of the context was cut out to fit
    text: str
    references: tuple[str, ...]
    score: float  # 0 to 1
    kl: float | None = None  # of the first token, recompute against this arm, nats
    top1: bool | None = None  # the first token is recompute's
    report: dict[str, Any]  # the engine's own
    group: str = ""  # LongBench-E's bucket, a task's subset


class Timing(_Record):
    """One measured request of one arm. The arms of a pair got the same tokens, one behind the other."""

    kind: Literal["timing"] = "timing"
    run: str
    dataset: str
    item: str
    pair: int
    warmup: bool
    position: int  # 0 for the arm that went first in this pair
    arm: str
    state: Literal["hot", "cold"]  # whether the documents had been read before
    prompt_tokens: int
    prompt_sha256: str
    ttft_request_s: float
    ttft_forward_s: float
    report: dict[str, Any]


class Fidelity(_Record):
    """How far an arm is from recompute on one prompt. ``noise-floor`` is recompute run another way."""

    kind: Literal["fidelity"] = "fidelity"
    run: str
    dataset: str
    item: str
    arm: str
    prompt_tokens: int
    layers: tuple[float, ...]  # relative error of the hidden state behind each layer, over the last rows
    kl: float  # nats, mean over the rows compared
    top1: float  # share of the rows whose most likely token is recompute's


class Load(_Record):
    """One request of a round against a server. In a closed loop so many clients each send when they have an answer."""

    kind: Literal["load"] = "load"
    run: str
    dataset: str
    arm: str
    level: float  # requests a second that arrive; clients in a closed loop
    round: int
    number: int
    arrived_s: float  # since the start of the round, as planned; when it was sent in a closed loop
    ttft_s: float  # arrival to first token
    latency_s: float  # arrival to last token
    prompt_tokens: int
    new_tokens: int
    error: str = ""
    report: dict[str, Any]
    loop: Literal["open", "closed"] = "open"
    late_s: float = 0.0  # by which the client itself sent it behind the plan


class Build(_Record):
    """The artifacts that a run built, or found, for one data set."""

    kind: Literal["build"] = "build"
    run: str
    dataset: str
    documents: int
    tokens: int
    found: int  # documents that the store had
    seconds: float  # wall clock, of those it did not have
    bytes: int  # on disk


class Rejected(_Record):
    """What does not count, and why: a reuse arm that ran dense, unequal tokens, caps or checkpoints."""

    kind: Literal["rejected"] = "rejected"
    run: str
    dataset: str
    item: str
    arm: str
    reason: str


Record = Annotated[
    Run | Answer | Timing | Fidelity | Load | Build | Rejected,
    Field(discriminator="kind"),
]
_RECORD: TypeAdapter[Record] = TypeAdapter(Record)


def read_results(path: Path) -> Iterator[Record]:
    """The records of a file, plain or ``.gz``; a last line that was cut is left out. InputError names file and line."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: not readable ({getattr(error, 'strerror', None) or error})") from None
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        if not line.strip():
            continue
        try:
            yield _RECORD.validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InputError(f"{path}:{number}: no result ({where + ': ' if where else ''}{first['msg']})") from None


class Results:
    """A results file that is appended to; one process at a time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / RESULTS
        self.records = list(read_results(self.path)) if self.path.exists() else []
        self._file = self.path.open("ab")
        if (size := self._file.tell()) and not self.path.read_bytes().endswith(b"\n"):
            whole = self.path.read_bytes().rfind(b"\n") + 1
            os.truncate(self.path, whole)
            self._file.seek(min(whole, size))

    def add(self, record: _Record) -> None:
        """Append one record; it is on its way to the disk when this returns."""
        self._file.write(json.dumps(record.model_dump(mode="json"), ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.records.append(record)  # type: ignore[arg-type]

    def close(self) -> None:
        """Write it out."""
        os.fsync(self._file.fileno())
        self._file.close()
