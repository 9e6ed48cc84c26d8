"""What the harness asks of an engine, and what comes back. Items, scores, records and timing are not its business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from eval.encoded import Encoded


@dataclass(frozen=True)
class Reply:
    """One answer, and what the engine says that it answered: the harness compares that across arms."""

    text: str
    token_ids: tuple[int, ...]
    report: Mapping[str, Any]  # the engine's own, in the form of redknot's Report.to_dict()
    ttft_request_s: float  # call or arrival to first token; with a server, at the client
    ttft_forward_s: float  # prefill entry to first token
    prompt_sha256: str  # Encoded.sha256 of what was sent
    max_new_tokens: int  # the cap that was sent
    checkpoint: str  # digest of the identity of the model that answered (ModelIdentity.digest)
    logits: Tensor | None = None  # float32 [vocab] of the first new token, where they can be had


class ArmEngine(Protocol):
    """Answers prompts in any of the arms that it was opened with, greedily, one request at a time.

    Artifacts of the documents are in its store before a request comes; more may be published between requests.
    """

    name: str  # "embedded" or "sglang"
    tp: int
    versions: Mapping[str, str]  # of what serves, beside redknot, python and torch

    def answer(self, arm: str, prompt: Encoded, max_new_tokens: int) -> Reply:
        """Answer in one arm; what is not reused is the report's to say. RedKnotError when the request is refused.

        The arm "recompute" runs with reuse off; every other one as its profile has it. What is made ready for the
        request (lists, JSON) is made before its clock starts.
        """
        ...

    def forget(self, arm: str) -> None:
        """Drop what an arm keeps of documents, so that its next request is cold.

        What belongs to starting, such as reading the catalogue, has run again when this returns.
        """
        ...

    def close(self) -> None:
        """End it; what it started is stopped."""
        ...
